"""Break files and read them.

    python -m benchmarks.fuzz [READER…] [--minutes 10] [--seed 0] [--write]
    python -m benchmarks.fuzz READER --again SEED       one broken file once more, with its traceback

Minutes are of each reader. Exit code 1 when something was found. `--write` puts the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.fuzz.inputs import READERS
from benchmarks.fuzz.run import Findings, again, fuzz

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- fuzz -->", "<!-- end of fuzz -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(reader.name for reader in READERS))
    parser.add_argument("--minutes", type=float, default=10.0, help="of each reader (default 10)")
    parser.add_argument("--files", type=int, default=1 << 40, help="of each reader, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first broken file")
    parser.add_argument("--again", type=int, metavar="SEED", help="read the broken file of this seed here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    args = parser.parse_args()
    known = {reader.name: reader for reader in READERS}
    if unknown := set(args.readers) - known.keys():
        parser.error(f"no reader is called {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in args.readers] or READERS
    found: list[Findings] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        if args.again is not None:
            again(chosen[0], Path(scratch) / "again", args.again)
            return 0
        for reader in chosen:
            one = fuzz(reader, Path(scratch) / reader.name, seconds=60 * args.minutes, first=args.seed, most=args.files)
            found.append(one)
            print(
                f"{one.name:<10} {one.files:>8,} files, {one.refused:,} refused, slowest {one.slowest_s:.2f} s, "
                f"memory +{one.largest_bytes >> 20} MiB, {len(one.wrong)} findings", flush=True,
            )  # fmt: skip
            for seed, text in sorted(one.wrong.items())[:20]:
                print(f"    {seed}: {text}", flush=True)
    if args.write:
        _write(found, args.minutes)
    return 1 if any(one.wrong for one in found) else 0


def _write(found: list[Findings], minutes: float) -> None:
    lines = ["| reader | broken files | refused | slowest | memory | findings |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {o.name} | {o.files:,} | {o.refused:,} | {o.slowest_s:.2f} s | +{o.largest_bytes >> 20} MiB | {len(o.wrong)} |" for o in found
    ]
    lines += ["", f"{minutes:g} minute{'' if minutes == 1 else 's'} each."]
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
