"""False alarms of the laws of a step (`relations/course`) on healthy programs, and in how many runs each had something to fail on.

    python benchmarks/laws.py [--work DIR] [--only a,b] [-i PACK] [PATTERN …]     # patterns of files; default: examples/ and examples/techniques/

Each program of one rank is recorded whole with its first settings (`truths.py`) and judged with the shipped packs, or with those that are named. A program that does not end
with 0 is left out. Of public programs, `python -m benchmarks.wild` prints the same table.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from truths import EXAMPLES, Examples, record, settings

from benchmarks.wild.judge import verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="of files, absolute, for glob")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--iters", default="24")
    parser.add_argument("-i", "--pack", type=Path, action="append", default=[])
    args = parser.parse_args()
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-laws-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    source = Examples(work, [EXAMPLES, EXAMPLES / "techniques"], args.iters, set(args.only.split(",")) if args.only else set())
    if args.patterns:
        found = sorted({path for pattern in args.patterns for path in Path("/").glob(pattern.lstrip("/"))})
        named = {f"{path.parent.name}-{path.stem}": path for path in found if "init_process_group" not in path.read_text()}
        source.take(named, {name: settings(path, args.iters) for name, path in named.items()})
    could: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    runs, left_out = 0, []
    for name, options in source.programs.items():
        for setting in [s for s in options if s in ("seed0", "size")]:
            run = record(source, work, name, setting)
            told = verdicts(run, args.pack) if run else {"steps": 0}
            if not told["steps"]:
                left_out.append(f"{name} ({setting})")
                continue
            runs += 1
            for rule, mode in told["chances"].items():
                could[mode] += 1
                failed[mode] += told["rules"][rule][1] == "violated"
            for v in told["violations"]:
                print(f"{name} ({setting}): {v['severity']} {v['relation']}: {v['text']} | {v['seen']}", flush=True)
    source.close()
    print(f"\n{runs} runs; left out: {', '.join(left_out) or 'none'}\n\n| law | runs | failed |\n|---|---|---|")
    print("\n".join(f"| {mode} | {n} | {failed[mode]} |" for mode, n in sorted(could.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
