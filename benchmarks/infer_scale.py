"""How long precondition inference takes, and how much memory, on a million examples of five thousand hypotheses.

    python benchmarks/infer_scale.py [--rows 1000000] [--hypotheses 5000] [--fields 24]

Frames are synthetic: `clean` never fails in 40 distinct circumstances, `diverse` never fails and hardly two examples
are alike, `separable` fails in 30 % of the hypotheses whenever one field has a certain value, `noise` fails at random
in 30 %, so that the whole search is spent on nothing. Each runs in a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import polars as pl

from proctor.infer.preconditions import infer_preconditions
from proctor.invariants.relations import Examples

CASES = ("clean", "diverse", "separable", "noise")
CIRCUMSTANCES = 40
PAIRED = 6  # fields of several records
SCOPE = 4


def frame(case: str, rows: int, hypotheses: int, fields: int) -> Examples:
    """A million examples; values are strings, as relations make them."""
    rng = np.random.default_rng(0)
    names = [f"field{k}" for k in range(fields)]
    kinds = rng.choice([2, 3, 3, 4, 5, 9, 21], fields)
    distinct = CIRCUMSTANCES if case == "clean" else rows
    codes = np.stack([rng.integers(0, n, distinct, dtype=np.uint8) for n in kinds], axis=1)
    agrees = rng.random((distinct, PAIRED)) < 0.7
    pick = rng.integers(0, distinct, rows)
    hyp = rng.integers(0, hypotheses, rows, dtype=np.uint32)
    passed = np.ones(rows, dtype=bool)
    failing = (rng.random(hypotheses) < 0.3)[hyp]
    if case == "separable":
        cause = rng.integers(0, fields, hypotheses)[hyp]
        passed = ~failing | (codes[pick, cause] == 1)
    elif case == "noise":
        passed = ~failing | (rng.random(rows) < 0.5)
    columns: dict[str, pl.Series] = {
        "hyp": pl.Series(hyp),
        "passed": pl.Series(passed),
        "proc": pl.Series(rng.integers(0, 8, rows, dtype=np.uint16)),
    }
    for k, name in enumerate(names):
        texts = pl.Series([None, *(f"torch.value.{k}.{i}" for i in range(kinds[k] - 1))], dtype=pl.String)
        columns[name] = texts.gather(pl.Series(codes[pick, k]))
    for k in range(PAIRED):
        columns[f"{names[k]}~"] = pl.Series(agrees[pick, k])
    return Examples(pl.DataFrame(columns), tuple(names), tuple(names[-SCOPE:]))


def measure(case: str, rows: int, hypotheses: int, fields: int) -> dict[str, float]:
    examples = frame(case, rows, hypotheses, fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    outcomes = infer_preconditions(examples)
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "rules": sum(o.precondition is not None for o in outcomes.values()),
        "frame_mib": examples.frame.estimated_size("mb"),
        "more_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hypotheses", type=int, default=5_000)
    parser.add_argument("--fields", type=int, default=24)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.rows, args.hypotheses, args.fields)))
        return 0
    print(f"{args.rows:,} examples, {args.hypotheses:,} hypotheses, {args.fields} fields")
    print(
        f"{'case':<10} {'wall s':>7} {'cpu s':>7} {'rules':>6} {'frame MiB':>10} {'added MiB':>10} {'peak MiB':>9}"
    )
    for case in CASES:
        done = subprocess.run([sys.executable, *sys.argv, "--case", case], check=True, stdout=subprocess.PIPE)
        m = json.loads(done.stdout)
        print(
            f"{case:<10} {m['seconds']:>7.1f} {m['cpu']:>7.1f} {m['rules']:>6,} {m['frame_mib']:>10.0f}"
            f" {m['more_mib']:>10.0f} {m['peak_mib']:>9.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
