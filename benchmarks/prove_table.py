"""The six rows of TrainVerify's Tables 2 and 3 on their whole meshes, and how the cost grows.

    python benchmarks/prove_table.py [--only L1 D1 …] [--growth] [--jobs 2] [--layers N] [--out FILE]
    python benchmarks/prove_table.py --proofs

The program is `prove_models.py` at the row's layers, mesh and microbatches, all of them, with a small width (two heads of two elements a tensor
parallel rank), two tokens and one row a microbatch. Its schedule is what was recorded. Few ranks are run, all are judged: EQUAL is a test at random points
of a finite field, not a proof by formulas. `--proofs` proves small meshes of the same program by formulas. `--layers` cuts layers,
and says so. A row: verdict, ranks that were run, seconds of CPU of all processes, seconds, MiB of the largest process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
from prove_models import Size, step

from proctor.oracle.prove import prove

ROWS = {
    "L1": Size(layers=32, dp=512), "L2": Size(layers=80, dp=16, tp=8, pp=4, microbatches=32), "L3": Size(layers=126, dp=64, tp=8, pp=16, microbatches=16),
    "D1": Size(layers=27, dp=16, tp=4, pp=2, microbatches=16, experts=True), "D2": Size(layers=60, dp=16, tp=8, pp=4, microbatches=16, experts=True),
    "D3": Size(layers=61, dp=32, tp=8, pp=8, microbatches=16, experts=True),
}  # fmt: skip
_SMALL = Size(layers=4, dp=4, tp=2, pp=2, microbatches=4)
GROWTH = {
    f"{name} {n}": msgspec.structs.replace(_SMALL, **{name: n})
    for name, several in (("layers", (4, 8, 16, 32)), ("dp", (4, 16, 64, 256)), ("tp", (2, 4, 8)), ("pp", (1, 2, 4)), ("microbatches", (2, 4, 8, 16)))
    for n in several
}
PROOFS = {
    "tp=2": Size(layers=1, tp=2), "dp=2": Size(layers=1, dp=2), "pp=2, 2 microbatches": Size(layers=2, pp=2, microbatches=2), "tp=2, experts": Size(layers=1, tp=2, experts=True),
    "dp=2,tp=2": Size(layers=1, dp=2, tp=2), "pp=2,dp=2,tp=2, 2 microbatches": Size(layers=2, pp=2, dp=2, tp=2, microbatches=2),
}  # fmt: skip


def judged(name: str, size: Size, jobs: int, proof_s: float) -> dict[str, Any]:
    """A row."""
    began, cpu = time.monotonic(), _cpu()
    verdict = prove(step(size), step(size), size.mesh, many=not proof_s, jobs=jobs, proof_s=proof_s)
    return {
        "row": name, **msgspec.to_builtins(size), "verdict": verdict.verdict, "why": verdict.why, "ranks": verdict.ranks, "assumed": verdict.assumed, "operations": verdict.operations,
        "outputs": verdict.outputs, "cpu_s": round(_cpu() - cpu, 1), "s": round(time.monotonic() - began, 1), "parts_s": {k: round(v, 1) for k, v in verdict.seconds.items()},
        "mib": max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10,
    }  # fmt: skip


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="ROW")
    parser.add_argument("--growth", action="store_true", help="a small mesh, one number larger at a time")
    parser.add_argument("--proofs", action="store_true", help="small meshes, proved by formulas")
    parser.add_argument("--proof", type=float, default=120.0, metavar="S", help="with --proofs: seconds of CPU for each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--layers", type=int, help="so many instead of the row's")
    parser.add_argument("--out", type=Path, help="a line of JSON for each row is added")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = PROOFS if args.proofs else GROWTH if args.growth else ROWS
    for name, size in rows.items():
        if args.only and name not in args.only:
            continue
        if args.layers:
            name, size = f"{name} with {args.layers} of {size.layers} layers", msgspec.structs.replace(size, layers=args.layers)
        row = json.dumps(judged(name, size, args.jobs, args.proof if args.proofs else 0.0))
        print(row, flush=True)
        if args.out:
            with args.out.open("a") as out:
                out.write(row + "\n")


if __name__ == "__main__":
    main()
