"""`proctor infer` against the size of the trace: seconds and memory, and the growth exponent.

    python benchmarks/infer_trace.py [--million 1] [--example transformer_lm] [--run RUN] [--profile] [--json FILE]

A real run (by default 60 iterations of an example) is continued on disk by repeating its training steps with new step
numbers and new fingerprints, to 1/16, 1/8, 1/4, 1/2 and all of the largest size; then the command learns from each.
Seconds of wall clock and CPU time, and peak memory, are the kernel's, of the whole command: start, reading, learning,
writing the pack; memory is that of its largest process. `--profile` learns from the largest once more, relation by
relation, and says what each took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROCTOR = [sys.executable, "-m", "proctor.cli"]
NO_VALUE = 3  # StateFlag.NONE | ZERO: their fingerprint is the same in every step
_MIX = 2654435761


class Tiling:
    """Continues one process of a run: training steps once more, with later numbers and other values."""

    def __init__(self, folder: Path) -> None:
        import polars as pl

        from proctor.invariants.schema import TABLES
        from proctor.invariants.trace.tables import read_stream

        present = [t for t in TABLES if t != "names" and (folder / f"{t}.arrow").exists()]
        self.frames = {t: pl.DataFrame(pl.from_arrow(read_stream(folder / f"{t}.arrow", t)[0])) for t in present}
        contexts, calls = self.frames["context"], self.frames["calls"]
        self.steps = _highest(contexts["step"]) + 1
        self.seqs, self.contexts = _highest(calls["seq"]) + 1, _highest(contexts["ctx"]) + 1
        self.span_ns = _highest(calls["t"]) - int(calls["t"].min() or 0) + 1  # type: ignore[arg-type]
        known = contexts.filter(pl.col("step") >= 0)["ctx"].implode()
        self.training = {t: frame.filter(pl.col("ctx").is_in(known)) for t, frame in self.frames.items()}
        self.repeated = self.training["calls"]["seq"]

    def rows(self, frames: dict[str, pl.DataFrame]) -> int:
        return sum(frame.height for table, frame in frames.items() if table != "context")

    def again(self, table: str, k: int) -> pl.DataFrame:
        """The k-th repetition of the rows of a table; what refers to a call before training still does."""
        import polars as pl

        frame = self.training[table]
        moved = [pl.col("ctx") + k * self.contexts]
        for name in {"seq", "parent", "call"} & set(frame.columns):
            later = pl.col(name).is_in(self.repeated.implode()) if name != "seq" else pl.col(name) > 0
            moved.append(pl.when(later).then(pl.col(name) + k * self.seqs).otherwise(pl.col(name)).alias(name))
        if "fp" in frame.columns:
            new = (pl.col("flags") & NO_VALUE == 0) & (pl.col("fp") != 0)
            fresh = pl.col("fp") ^ pl.lit(k * _MIX, dtype=pl.UInt64)
            moved.append(pl.when(new).then(fresh).otherwise(pl.col("fp")).alias("fp"))
        if "step" in frame.columns:
            moved.append(pl.col("step") + k * self.steps)
        if "t" in frame.columns:
            moved.append(pl.col("t") + k * self.span_ns)
        return frame.with_columns(moved).cast(frame.schema)


def _highest(column: pl.Series) -> int:
    value = column.max()
    return int(value) if isinstance(value, int) else 0


def continued(run: Path, records: int, target: Path) -> int:
    """Write a run of about so many records; returns how many it has."""
    from pyarrow import ipc

    from proctor.invariants.schema import TABLES

    shutil.copytree(run, target, ignore=shutil.ignore_patterns("boot", "*.arrow"))
    folders = sorted((run / "procs").iterdir())
    tilings = {folder: Tiling(folder) for folder in folders}
    own = sum(t.rows(t.frames) for t in tilings.values())
    each = sum(t.rows(t.training) for t in tilings.values())
    times = max(0, round((records - own) / each))
    for folder, tiling in tilings.items():
        to = target / "procs" / folder.name
        shutil.copy(folder / "names.arrow", to / "names.arrow")
        for table, frame in tiling.frames.items():
            schema, options = TABLES[table], ipc.IpcWriteOptions(compression="zstd")
            with ipc.new_stream(str(to / f"{table}.arrow"), schema, options=options) as out:
                out.write_table(frame.to_arrow().cast(schema))
                for k in range(1, times + 1):
                    out.write_table(tiling.again(table, k).to_arrow().cast(schema))
    return own + times * each


def spend(command: Sequence[str], log: Path) -> dict[str, float]:
    """Seconds and peak memory of a command and all that it waits for.

    Raises:
        SystemExit: the command failed; with the end of what it said.
    """
    started = time.perf_counter()
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{log.read_text(errors='replace')[-2000:]}")
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
    }


def profile(run: Path) -> None:
    """What each relation takes, one after another in this process, and how far each drives its memory.

    Views of the trace that relations share are made by the first that needs them.
    """
    from proctor.infer.preconditions import infer_preconditions
    from proctor.invariants.relations import registry
    from proctor.invariants.trace import Trace

    print(f"{'':<14} {'':<14} {'wall s':>7} {'cpu s':>7} {'peak MiB':>9}")
    with _timed("", "read"):
        trace = Trace.load([run])
    for name, relation in registry().items():
        with _timed(name, "propose"):
            hypotheses = sorted(set(relation.propose(trace)), key=lambda h: h.params)
        if hypotheses:
            with _timed(name, "examples"):
                examples = relation.examples(trace, hypotheses)
            with _timed(name, "preconditions"):
                infer_preconditions(examples)


@contextmanager
def _timed(relation: str, phase: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{relation:<14} {phase:<14} {wall:>7.2f} {cpu:>7.2f} {peak_mib:>9.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a recorded run (default: an example is recorded)")
    parser.add_argument("--example", default="transformer_lm")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--million", type=float, default=1.0, help="records of the largest size (default 1)")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("infer", nargs="*", metavar="-- OPTION", help="more options of `proctor infer`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proctor-bench-") as name:
        work = Path(name)
        run, log = args.run or work / "run", work / "log"
        if args.run is None:
            program = [sys.executable, str(EXAMPLES / f"{args.example}.py"), "--iters", str(args.iterations)]
            spend([*PROCTOR, "record", "-o", str(run), "--", *program], log)
        rows = []
        print(f"{'records':>11} {'MB':>6} {'rules':>6} {'wall s':>8} {'cpu s':>8} {'peak MiB':>9}")
        for part in (16, 8, 4, 2, 1):
            large, pack = work / f"run{part}", work / "pack.json"
            records = continued(run, int(args.million * 1e6 / part), large)
            size = sum(f.stat().st_size for f in large.rglob("*.arrow"))
            r = spend([*PROCTOR, "infer", "-q", *args.infer, str(large), "-o", str(pack)], log)
            rules = len(json.loads(pack.read_bytes())["invariants"])
            rows.append({"records": records, "bytes": size, "rules": rules, **r})
            print(
                f"{records:>11,} {size / 1e6:>6.0f} {rules:>6} {r['wall_s']:>8.2f} {r['cpu_s']:>8.2f} {r['peak_mib']:>9.0f}",
                flush=True,
            )
            if part > 1:
                shutil.rmtree(large)
        last = rows[-1]
        said = ", ".join(
            f"{kind[:-2]} {_exponent(rows, kind):.2f} (last doubling {_exponent(rows[-2:], kind):.2f})"
            for kind in ("wall_s", "cpu_s")
        )
        print(f"{last['cpu_s'] / last['records'] * 1e6:.2f} CPU s per million records; growth exponent: {said}")
        if args.profile:
            profile(work / "run1")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def _exponent(rows: Sequence[dict[str, float]], kind: str) -> float:
    """Slope of log time over log size, from the first to the last."""
    first, last = rows[0], rows[-1]
    return math.log(last[kind] / first[kind]) / math.log(last["records"] / first["records"])


if __name__ == "__main__":
    sys.exit(main())
