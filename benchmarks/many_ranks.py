"""How many ranks one verifier holds: 4,096 simulated replicas, one step each a second, on one core.

    python benchmarks/many_ranks.py [--ranks 4096] [--steps 34] [-i PACK…]

The rows of one rank of a real DDP run, recorded with what the packs need, are sent for every rank, with weights that are equal on all of them until one rank parts from the others. Frames are decoded, records
given their codes, and rules judged, all in this thread; what the server's thread costs is in `benchmarks/transport.py`. Printed are
CPU seconds a step, of the steps that look like those before until one in which a rank parts, and memory. The mean holds the rules that
are judged now and then, for many steps at once.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

os.environ["POLARS_MAX_THREADS"] = "1"  # as a verifier has; polars looks when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.live.flushes import Recorded

from proctor.invariants.pack import read_pack
from proctor.invariants.relations import registry
from proctor.invariants.wire import frames
from proctor.invariants.wire.arrow_message import Encoded
from proctor.invariants.wire.frames import ORDER, Flush
from proctor.verify.live.online import OnlineChecker

ROOT = Path(__file__).resolve().parent.parent
_ALIKE = 14  # the first of the steps whose windows look like those before: rows are the same from the 7th on


def record(folder: Path, packs: list[Path]) -> Recorded:
    """Rank 0 of a two-rank run, with what these packs need."""
    select = [word for pack in packs for word in ("--select", str(pack))]
    command = [sys.executable, "-m", "proctor.cli", "record", "-o", str(folder), *select, "--", sys.executable, "-m"]
    command += ["torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "tests" / "helpers" / "live" / "parting.py"), "--iters", "12"]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return Recorded(next((folder / "procs").glob("0-*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--part-at", type=int, default=30)
    parser.add_argument("-i", "--pack", dest="packs", nargs="+", type=Path, default=[ROOT / "invariants/packs/distributed.json"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rank0 = record(Path(work) / "run", args.packs)
    packs = [read_pack(p, list(registry())) for p in args.packs]
    checker = OnlineChecker(packs, run="many", program="parting.py")
    per_step: list[float] = []
    size = 0
    found: dict[str, int] = {}
    for step in range(-1, args.steps):
        source = min(step, 6)  # of these steps all look alike
        _, tables, info, _ = rank0.step(source)
        blobs = []
        for odd in (False, True):
            mine = {name: table for name, table in tables.items() if table.num_rows}
            if step > source:
                mine["context"] = _set(mine["context"], "step", step)
            if odd and "states" in mine and step >= args.part_at:
                changed = mine["states"]["fp"].to_numpy() ^ np.uint64(1)
                mine["states"] = _set(mine["states"], "fp", changed)
            batches = {n: Encoded.of(t.combine_chunks().to_batches()[0]) for n, t in mine.items()}
            blobs.append(frames.pack(batches))
        size = sum(blobs[0][1])
        zero = tuple(0 for _ in ORDER)
        begin = time.process_time()
        for rank in range(args.ranks):
            rows, sizes, body = blobs[rank == 17]
            records = frames.unpack(Flush(step + 1, step + 1, zero, rows, sizes), b"".join(body))
            told = {**info, "rank": rank, "world": args.ranks} if step < 0 else None
            checker.live.add(f"{rank}-{rank + 1000}", records, told, step + 1)
        for one in checker.rounds():
            for violation in one.violations:
                found.setdefault(violation.text, checker.judged)
        per_step.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steady = per_step[_ALIKE : args.part_at + 1]
    print(f"{args.ranks} ranks, {size / 1024:.1f} KiB a rank and step, {checker.live.rows} records held")
    told = f"median {statistics.median(steady):.2f} s, mean {statistics.mean(steady):.2f} s, most {max(steady):.2f} s"
    print(f"CPU a step: {told}; peak RSS {peak:.0f} MiB")
    for text, step in found.items():
        print(f"  known after step {step}: {text}")
    return 0


def _set(table: pa.Table, column: str, values: object) -> pa.Table:
    field = table.schema.field(column)
    array = pa.array(np.full(table.num_rows, values) if np.isscalar(values) else values, type=field.type)
    return table.set_column(table.schema.get_field_index(column), field, array)


if __name__ == "__main__":
    sys.exit(main())
