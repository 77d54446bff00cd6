"""The six rows of TrainVerify's Tables 2 and 3 on their whole meshes, a small mesh with all three axes, and how the cost grows.

    python benchmarks/prove_table.py [--only L1 D1 …] [--growth] [--jobs 2] [--layers N] [--proof S] [--out FILE]
    python benchmarks/prove_table.py --proofs
    python benchmarks/prove_table.py --write docs/prove.md --out FILE

The program is `prove_models.py` at the row's layers, mesh and microbatches, all of them, with a small width (two heads of two elements a tensor
parallel rank), two tokens and one row a microbatch. Its schedule is what was recorded. Few ranks are run, all are judged: EQUAL is a test at random points
of a finite field. It becomes PROVED by a small program of the same kind (two of each axis, three stages, three layers a stage, three microbatches), which is proved by formulas, where every
operation of the large one has the surroundings of one there (`--proof 0`: without). `--proofs` proves small meshes of the same program by formulas. `--layers` cuts layers,
and says so. A row: verdict, ranks that were run, seconds of CPU of all processes, seconds, MiB of the largest process. `--write` puts the rows of `--out` into the page, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
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
    "D3": Size(layers=61, dp=32, tp=8, pp=8, microbatches=16, experts=True), "64 ranks": Size(layers=8, dp=4, tp=4, pp=4, microbatches=5),
}  # fmt: skip
_SMALL = Size(layers=4, dp=4, tp=2, pp=2, microbatches=4)
GROWTH = {
    f"{name} {n}": msgspec.structs.replace(_SMALL, **{name: n})
    for name, several in (("layers", (4, 8, 16, 32)), ("dp", (4, 16, 64, 256)), ("tp", (2, 4, 8)), ("pp", (1, 2, 4)), ("microbatches", (2, 4, 8, 16)))
    for n in several
}
_PAPER = {"L1": "0.5 h", "L2": "7.5 h", "L3": "47 h", "D1": "0.5 h", "D2": "3.5 h", "D3": "31 h"}
_MARKS = ("<!-- prove_table -->", "<!-- end of prove_table -->")
PROOFS = {
    "tp=2": Size(layers=1, tp=2), "dp=2": Size(layers=1, dp=2), "pp=2, 2 microbatches": Size(layers=2, pp=2, microbatches=2), "tp=2, experts": Size(layers=1, tp=2, experts=True),
    "dp=2,tp=2": Size(layers=1, dp=2, tp=2), "pp=2,dp=2,tp=2, 2 microbatches": Size(layers=2, pp=2, dp=2, tp=2, microbatches=2),
}  # fmt: skip


def less(size: Size) -> Size:
    """A small program of the same kind: it has a stage in the middle, and a layer in the middle of it."""
    pp = min(size.pp, 3)
    return Size(layers=3 * pp, dp=min(size.dp, 2), tp=min(size.tp, 2), pp=pp, microbatches=min(size.microbatches, 3), experts=size.experts)


def judged(name: str, size: Size, jobs: int, proof_s: float, many: bool) -> dict[str, Any]:
    """A row."""
    began, cpu, there = time.monotonic(), _cpu(), less(size)
    small = (step(there), step(there), there.mesh) if many and proof_s else None
    verdict = prove(step(size), step(size), size.mesh, many=many, jobs=jobs, proof_s=proof_s, small=small)
    return {
        "row": name, **msgspec.to_builtins(size), "verdict": verdict.verdict, "why": verdict.why, "ranks": verdict.ranks, "assumed": verdict.assumed, "operations": verdict.operations,
        "outputs": verdict.outputs, "cpu_s": round(_cpu() - cpu, 1), "s": round(time.monotonic() - began, 1), "parts_s": {k: round(v, 1) for k, v in verdict.seconds.items()},
        "mib": max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10,
    }  # fmt: skip


def written(rows: list[dict[str, Any]]) -> str:
    """The table of the page: of each row the last run."""
    lines = ["| row | layers, dp, tp, pp, microbatches | verdict | ranks run | s of CPU | s that passed | MiB | TrainVerify | Scalify |", "|---|---|---|---|---|---|---|---|---|"]
    for row in {row["row"]: row for row in rows}.values():
        numbers = ", ".join(str(row[k]) for k in ("layers", "dp", "tp", "pp", "microbatches"))
        ran = next((found.group(1) for text in row["assumed"] if (found := re.search(r"\((\d+) of \d+\) do", text))), str(row["ranks"]))
        said = f"{row['verdict']}, {row['outputs']:,} outputs, {row['operations'] / 1e6:,.0f} million operations"
        lines.append(f"| {row['row']} | {numbers} | {said} | {ran} of {row['ranks']:,} | {row['cpu_s']:.0f} | {row['s']:.0f} | {row['mib']:,} | {_PAPER.get(row['row'], '')} | {'minutes' if row['row'] == 'L3' else ''} |")
    return "\n".join(lines)


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="ROW")
    parser.add_argument("--growth", action="store_true", help="a small mesh, one number larger at a time")
    parser.add_argument("--proofs", action="store_true", help="small meshes, proved by formulas")
    parser.add_argument("--proof", type=float, default=120.0, metavar="S", help="seconds of CPU for a proof by formulas, 0 for none")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put what --out has into the page, and run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--layers", type=int, help="so many instead of the row's")
    parser.add_argument("--out", type=Path, help="a line of JSON for each row is added")
    args = parser.parse_args()
    if args.write:
        if not args.out:
            parser.error("--write needs --out, the file with the rows")
        before, _, rest = args.write.read_text().partition(_MARKS[0])
        after = rest.partition(_MARKS[1])[2]
        args.write.write_text(f"{before}{_MARKS[0]}\n{written([json.loads(line) for line in args.out.read_text().splitlines()])}\n{_MARKS[1]}{after}")
        return
    warnings.simplefilter("ignore")
    rows = PROOFS if args.proofs else GROWTH if args.growth else ROWS
    for name, size in rows.items():
        if args.only and name not in args.only:
            continue
        if args.layers:
            name, size = f"{name} with {args.layers} of {size.layers} layers", msgspec.structs.replace(size, layers=args.layers)
        row = json.dumps(judged(name, size, args.jobs, args.proof, not args.proofs))
        print(row, flush=True)
        if args.out:
            with args.out.open("a") as out:
                out.write(row + "\n")


if __name__ == "__main__":
    main()
