"""Do the faults and say what came of each.

    python -m benchmarks.faults [NAME…] [--results FILE] [--write] [--keep FOLDER]

Each fault happens to a small job twice, without Proctor and under `proctor watch`. Held against each other: every loss and the last
parameters, bit for bit; the exit code; the verdicts, live and of `proctor check`, against what is true; what is left behind (processes,
sockets, unfinished files, anything beside the run directory). Exit code 1 when one did not survive. `--results` keeps what came of each in a
file, and does not do again what is there; `--write` puts the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults import outside
from benchmarks.faults.table import FAULTS
from benchmarks.faults.trial import Outcome, UnavailableError, attempt, clear

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--results", metavar="FILE", type=Path, help="where outcomes are kept, one JSON object a line")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
    parser.add_argument("--keep", metavar="FOLDER", help="keep runs of faults that were not survived there")
    args = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := set(args.names) - known.keys():
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    done = _done(args.results)
    found: list[Outcome] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        for fault in [known[name] for name in args.names] or FAULTS:
            if fault.name in done:
                found.append(done[fault.name])
                continue
            folder = Path(args.keep or scratch) / fault.name
            clear(folder)
            try:
                outcome = attempt(fault, folder)
            except UnavailableError as why:
                left_out.append(f"{fault.name}: {why}")
                print(f"{fault.name:<20} left out: {why}", flush=True)
                continue
            finally:
                outside.tidy_up()
            if outcome.survived:
                clear(folder)
            found.append(outcome)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            print(f"{fault.name:<20} {'survived' if outcome.survived else 'NOT'} {outcome.verdict} {outcome.seconds:.0f} s", flush=True)
            for line in outcome.wrong:
                print(f"    {line}", flush=True)
    survived = sum(one.survived for one in found)
    print(f"{survived} of {len(found)} faults survived" + (f"; left out: {'; '.join(left_out)}" if left_out else ""))
    if args.write:
        _write(found, left_out)
    return 0 if survived == len(found) else 1


def _done(results: Path | None) -> dict[str, Outcome]:
    """Outcomes of faults that were survived before; the last of each."""
    if results is None or not results.exists():
        return {}
    outcomes = [Outcome(**json.loads(line)) for line in results.read_text().splitlines()]
    return {one.name: one for one in outcomes if one.survived}


def _write(found: list[Outcome], left_out: list[str]) -> None:
    def mark(good: bool) -> str:
        return "yes" if good else "**no**"

    lines = ["| fault | what happens | bits | exit code | verdict | true | nothing left |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| `{o.name}` | {o.what} | {mark(o.bits)} | {mark(o.code)} | {o.verdict} | {mark(o.true)} | {mark(o.clean)} |" for o in found
    ]
    lines += ["", f"{sum(o.survived for o in found)} of {len(found)} survived." + (f" Left out: {'; '.join(left_out)}." if left_out else "")]
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
