"""Inference against the size of the trace: seconds and memory per million records, and the growth exponent.

    python benchmarks/infer_trace.py [--run RUN] [--million 1] [--json FILE]

A real run (by default a recorded transformer) is continued by repeating its steps with new step numbers and new
fingerprints, at 1×, 2×, 4×, 8× and 16× of a sixteenth of the largest size. Each size is inferred in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

HERE = Path(__file__).parent


def tiled(run: Path, records: int):  # type: ignore[no-untyped-def]
    """The trace of `run`, continued until it has this many records."""
    from proctor.invariants.trace import Trace

    trace = Trace.load([run])
    own = trace.calls.height + trace.states.height
    times = max(1, round(records / own))
    seqs, steps, contexts = int(trace.calls["seq"].max()) + 1, trace.steps, int(trace.contexts["ctx"].max()) + 1  # type: ignore[arg-type]

    def shift(frame: pl.DataFrame, k: int) -> pl.DataFrame:
        moves = [(pl.col("ctx") + k * contexts).cast(pl.UInt32)]
        for name in ("seq", "parent", "call"):
            if name in frame.columns:
                moved = pl.when(pl.col(name) > 0).then(pl.col(name) + k * seqs).otherwise(0)
                moves.append(moved.cast(pl.UInt32).alias(name))
        if "fp" in frame.columns:
            moves.append(pl.when(pl.col("flags") & 3 == 0).then(pl.col("fp") ^ pl.lit(k * 2654435761, dtype=pl.UInt64)).otherwise(pl.col("fp")).alias("fp"))
        if "step" in frame.columns:
            moves.append((pl.col("step") + k * steps).cast(pl.Int32).alias("step"))
        return frame.with_columns(moves)

    def repeat(frame: pl.DataFrame) -> pl.DataFrame:
        return pl.concat([frame, *(shift(frame, k) for k in range(1, times))])

    later = trace.contexts.filter(pl.col("step") >= 0)
    known = later["ctx"].implode()
    trace.contexts = pl.concat([trace.contexts, *(shift(later, k) for k in range(1, times))])
    for table in ("calls", "states"):
        frame = getattr(trace, table)
        training = frame.filter(pl.col("ctx").is_in(known))
        setattr(trace, table, pl.concat([frame, *(shift(training, k) for k in range(1, times))]))
    trace.__dict__.pop("steps", None)
    return trace


def one(run: Path, records: int) -> None:
    from proctor.infer.engine import infer
    from proctor.invariants.relations import registry

    trace = tiled(run, records)
    loaded_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    wall, cpu = time.perf_counter(), time.process_time()
    rules, _ = infer(trace, list(registry().values()), strict=True)
    print(json.dumps({
        "records": trace.calls.height + trace.states.height, "rules": len(rules),
        "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu,
        "loaded_mib": loaded_mib, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--million", type=float, default=1.0)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.one:
        one(args.run, args.one)
        return 0
    with tempfile.TemporaryDirectory(prefix="proctor-bench-") as work:
        run = args.run or Path(work) / "run"
        if args.run is None:
            subprocess.run(
                [sys.executable, "-m", "proctor.cli", "record", "-o", str(run), "--", sys.executable,
                 str(HERE / "workloads.py"), "transformer", "60", "1000"], check=True, capture_output=True,
            )
        rows = []
        print(f"{'records':>10} {'rules':>6} {'wall s':>8} {'cpu s':>8} {'peak MiB':>9}  (of which loaded)")
        for factor in (1, 2, 4, 8, 16):
            size = int(args.million * 1e6 * factor / 16)
            done = subprocess.run(
                [sys.executable, __file__, "--run", str(run), "--one", str(size)], check=True, capture_output=True, text=True
            )
            r = json.loads(done.stdout.splitlines()[-1])
            rows.append(r)
            print(f"{r['records']:10} {r['rules']:6} {r['wall_s']:8.2f} {r['cpu_s']:8.2f} {r['peak_mib']:9.0f}  ({r['loaded_mib']:.0f})", flush=True)
    first, last = rows[0], rows[-1]
    exponent = math.log(last["cpu_s"] / first["cpu_s"]) / math.log(last["records"] / first["records"])
    print(f"{last['cpu_s'] / last['records'] * 1e6:.2f} CPU s per million records, growth exponent {exponent:.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
