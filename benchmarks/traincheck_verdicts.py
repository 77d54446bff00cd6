"""Differential test: our verdict on imported rules against TrainCheck's own, rule by rule.

    python benchmarks/traincheck_verdicts.py TRACE_FOLDER INVARIANTS… --python ENV/bin/python
    python benchmarks/traincheck_verdicts.py TRACE_FOLDER INVARIANTS… --reference verdicts.jsonl

`ENV` is an environment with TrainCheck (`pip install traincheck==0.2.0`); without it, nothing is compared. Prints a
table of families by (TrainCheck's verdict, ours) and each rule on which they differ. Exit code 1 where a rule fails
for one and not for the other. A rule of FunctionCover that holds is never "triggered" for TrainCheck.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl

from proctor.infer.importers.traincheck.rules import convert
from proctor.infer.importers.traincheck.run import import_run
from proctor.invariants.invariant import Invariant
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

_SKIPPED = 3  # exit code of the reference script where TrainCheck is not installed


def main() -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("invariants", nargs="+", type=Path)
    parser.add_argument("--reference", type=Path, help="output of traincheck_reference.py")
    parser.add_argument("--python", help="interpreter of an environment with TrainCheck")
    args = parser.parse_args()
    reference = _reference(args)
    if reference is None:
        print("skipped: no TrainCheck (--python) and no verdicts of it (--reference)")
        return 0
    ours, seconds = verdicts(args.traces, args.invariants)
    table: Counter[tuple[str, str, str]] = Counter()
    wrong = 0
    for row, (verdict, rule) in zip(reference, ours, strict=True):
        table[row["relation"], row["verdict"], verdict] += 1
        if (row["verdict"] == "failed") != (verdict == "failed") and row["verdict"] != "crash":
            wrong += 1
            print(f"{Path(row['file']).name}:{row['line']} TrainCheck {row['verdict']}, ours {verdict}: {rule.text}")
    for (relation, theirs, mine), n in sorted(table.items()):
        print(f"{relation:32} TrainCheck {theirs:7} ours {mine:8} {n:6}")
    print(f"{sum(table.values())} rules, {wrong} of them fail for one only; ours took {seconds:.1f} s with the import")
    return 1 if wrong else 0


def verdicts(traces: Path, files: list[Path]) -> tuple[list[tuple[str, Invariant]], float]:
    """Our verdict on every rule of these files, in their order, and the seconds it took."""
    rules = [convert(json.loads(line)) for path in files for line in path.read_text().splitlines() if line.strip()]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        import_run(traces, run)
        trace = Trace.load([run])
        found: dict[str, str] = {}
        for name, relation in registry().items():
            mine = list({r.id: r for r in rules if r.relation == name}.values())
            frame = relation.examples(trace, [r.hypothesis for r in mine]).frame if mine else pl.DataFrame()
            for i, rule in enumerate(mine):
                found[rule.id] = _verdict(frame.filter(pl.col("hyp") == i), rule)
    return [(found[r.id], r) for r in rules], time.perf_counter() - start


def _verdict(examples: pl.DataFrame, rule: Invariant) -> str:
    met = examples.filter(rule.precondition.holds(frozenset(examples.columns)))["passed"]
    if not met.len():
        return "idle"
    if (~met).any():
        return "failed"
    return "passed" if met.any() else "unknown"


def _reference(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    if args.reference is not None:
        return [json.loads(line) for line in args.reference.read_text().splitlines()]
    if args.python is None:
        return None
    script = Path(__file__).with_name("traincheck_reference.py")
    command = [args.python, str(script), str(args.traces), *map(str, args.invariants)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == _SKIPPED:
        return None
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
