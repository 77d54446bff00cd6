"""Does live judging say what `proctor check` says, and how soon? Recorded runs, let go of step by step as their ranks would.

    python benchmarks/live.py RUN… -i PACK… [--uneven N]

For each run: rules violated live and offline, those that only one of the two found, and the step after which the first was known.
With --uneven the run is let go of N times more: several steps at once, ranks ahead of each other, rounds that are left and taken up again.
Exit code 1 when live judging found a violation that `check` does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.flushes import Flush, flushes, uneven

from proctor.invariants.pack import Pack, read_pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.checker import check
from proctor.verify.live.online import OnlineChecker

Found = dict[str, tuple[int, Violation]]
"""Rules that are violated: the last step that was over when that was known, and what was said."""


def live(run: Path, packs: list[Pack], let_go: Iterable[Flush], *, together: bool) -> Found:
    program = str(json.loads((run / "run.json").read_bytes()).get("program", ""))
    checker = OnlineChecker(packs, run=str(run), program=program, together=together)
    found: Found = {}
    for process, records, info, reached in let_go:
        checker.live.add(process, records, info, reached)
        for one in checker.rounds(some=together):
            for violation in one.violations:
                found.setdefault(violation.id, (checker.judged, violation))
    for one in checker.finish():
        for violation in one.violations:
            found.setdefault(violation.id, (checker.judged, violation))
    for name, error in checker.errors.items():
        print(f"  {run}: {name} could not be evaluated: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, required=True)
    parser.add_argument("--uneven", metavar="N", type=int, default=0, help="times that the run is let go of unevenly")
    args = parser.parse_args()
    packs = [read_pack(path, list(registry())) for path in args.packs]
    wrong = 0
    for run in args.runs:
        offline = {violation.id for violation in check(Trace.load([run]), packs).violations}
        for turn in range(args.uneven + 1):
            found = live(run, packs, uneven(run, Random(turn)) if turn else flushes(run), together=turn > 0)
            extra, missed = found.keys() - offline, offline - found.keys()
            wrong += len(extra)
            first = f", first known after step {min(step for step, _ in found.values())}" if found else ""
            how = f"unevenly ({turn}): " if turn else ""
            print(f"{run}: {how}live {len(found)}, check {len(offline)}, only live {len(extra)}, only check {len(missed)}{first}", flush=True)
            for step, violation in (found[id_] for id_ in sorted(extra)):
                print(f"  only live, after step {step}: {violation.relation}: {violation.text} | seen {violation.seen} | {violation.when}"[:400])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
