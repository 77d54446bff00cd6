"""Does live judging say what `proctor check` says, and how soon? Recorded runs, let go of step by step as their ranks would.

    python benchmarks/live.py RUN… -i PACK…

For each run: rules violated live and offline, those that only one of the two found, and the step after which the first was known.
Exit code 1 when live judging found a violation that `check` does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.flushes import flushes

from proctor.invariants.pack import Pack, read_pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check
from proctor.verify.live.online import OnlineChecker


def live(run: Path, packs: list[Pack]) -> dict[str, int]:
    """Rules that are violated, and the last step that was over when that was known."""
    program = str(json.loads((run / "run.json").read_bytes()).get("program", ""))
    checker = OnlineChecker(packs, run=str(run), program=program, together=False)
    found: dict[str, int] = {}
    for process, records, info, reached in flushes(run):
        for violation in checker.feed(process, records, info, reached):
            found.setdefault(violation.id, checker.judged)
    for one in checker.finish():
        for violation in one.violations:
            found.setdefault(violation.id, checker.judged)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, required=True)
    args = parser.parse_args()
    packs = [read_pack(path, list(registry())) for path in args.packs]
    wrong = 0
    for run in args.runs:
        found = live(run, packs)
        offline = {violation.id for violation in check(Trace.load([run]), packs).violations}
        extra, missed = found.keys() - offline, offline - found.keys()
        wrong += len(extra)
        first = f", first known after step {min(found.values())}" if found else ""
        print(f"{run}: live {len(found)}, check {len(offline)}, only live {len(extra)}, only check {len(missed)}{first}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
