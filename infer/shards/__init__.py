"""What one task of an inference reads: some small runs, one run, or a window of steps of a long one.

`engine` calls `of_runs` once with the run directories and a limit of memory; each task (`tasks.py`) then opens its shard with `open_shard`, in
whichever process it runs. In: directories, or a trace in memory. Out: shards, which are small and picklable, and their traces; each
step of a run is judged in one shard, with the steps around it that this needs. For example two runs of 30 steps and one of 20,000, of which 4,096 fit into memory:

    Shard(runs=("a", "b"), …)    Shard(runs=("c",), window=Window(-1, 4096))    Shard(runs=("c",), window=Window(4096, 8192))    …
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import polars as pl

from proctor.infer.evidence import sources
from proctor.invariants.fit import used
from proctor.invariants.pack import Source
from proctor.invariants.schema import TABLES
from proctor.invariants.trace import Trace
from proctor.invariants.trace.tables import read_stream
from proctor.invariants.trace.windows import NAMES, REACH, Window, spread

_TABLES: Final = ("calls", "states", "values")
_GROWTH: Final = 24  # bytes that inference takes at most for a byte of tables on disk
_LEAST_STEPS: Final = 32  # of a window
HELD_BYTES: Final = 2 << 30  # of traces that a process keeps between two visits


@dataclass(frozen=True)
class Shard:
    """Whole runs, or a window of one.

    runs: what they are called in messages.
    paths: their directories; () when the records are in memory.
    trace: the records, when they are in memory.
    window: only these steps, with the context that they need.
    """

    runs: tuple[str, ...]
    paths: tuple[str, ...] = ()
    trace: Trace | None = None
    window: Window | None = None

    @property
    def key(self) -> str:
        """Equal for equal records of one machine."""
        own = "\n".join(self.paths) or f"memory {id(self.trace)}"
        return f"{own} {self.window.first}" if self.window else own


class Summary(msgspec.Struct, frozen=True):
    """What a shard holds."""

    run: str
    program: str
    processes: int
    calls: int
    states: int
    values: int
    libraries: dict[str, tuple[str, ...]] = {}  # that it used, with their versions
    notes: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    definitions: dict[str, str] = {}  # what the user's functions and classes are, by name

    def plus(self, other: Summary) -> Summary:
        """Of two windows of one run."""
        return msgspec.structs.replace(
            self,
            calls=self.calls + other.calls,
            states=self.states + other.states,
            values=self.values + other.values,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    @property
    def records(self) -> int:
        return self.calls + self.states + self.values


def of_runs(
    paths: Sequence[str | Path], *, group_bytes: int = 0, memory_bytes: int | None = None, reach: int = REACH
) -> list[Shard]:
    """Shards of run directories; equal paths once.

    Args:
        paths: of the runs.
        group_bytes: of tables on disk that are read together. What relations do with a run takes a quarter of a second
            however small it is.
        memory_bytes: that one shard may take; a run that needs more is read in windows of steps.
        reach: of the windows.
    """
    shards: list[Shard] = []
    groups: list[list[tuple[str, str]]] = []
    room = 0
    for resolved, path in {Path(p).resolve(): p for p in paths}.items():
        size = table_bytes(resolved)
        parts = ceil(size * _GROWTH / memory_bytes) if memory_bytes else 1
        windows = _windows(resolved, parts, reach) if parts > 1 else []
        if len(windows) > 1:
            shards += [Shard((str(path),), (str(resolved),), window=w) for w in windows]
            continue
        if not groups or size > room:
            groups.append([])
            room = group_bytes
        groups[-1].append((str(path), str(resolved)))
        room -= size
    return [Shard(tuple(run for run, _ in group), tuple(path for _, path in group)) for group in groups] + shards


def _windows(path: Path, parts: int, reach: int) -> list[Window]:
    """Windows that split a run into so many parts, or fewer where they would be mostly context."""
    last = -1
    for file in path.glob("procs/*/context.arrow"):
        step = pl.DataFrame(pl.from_arrow(read_stream(file, "context")[0]))["step"].max()
        last = max(last, step) if isinstance(step, int) else last
    return spread(last + 1, max(ceil((last + 1) / parts), _LEAST_STEPS), reach)


def of_trace(trace: Trace) -> list[Shard]:
    """A shard for each run of a trace in memory."""
    if len(trace.runs) < 2:
        return [Shard(tuple(trace.runs), trace=trace)]
    return [Shard((name,), trace=_of_run(trace, run)) for run, name in enumerate(trace.runs)]


def summarize(shard: Shard, trace: Trace) -> list[Summary]:
    """Counts and origins of each run of a shard."""
    return [_summarize(trace if len(shard.runs) == 1 else _of_run(trace, i), run) for i, run in enumerate(shard.runs)]


def _summarize(trace: Trace, run: str) -> Summary:
    return Summary(
        run=run,
        program=trace.processes[0].program if trace.processes else "",
        processes=len(trace.processes),
        calls=trace.calls.height,
        states=trace.states.height,
        values=trace.values.height,
        libraries={name: tuple(sorted(versions)) for name, versions in sorted(used(trace).items())},
        notes=tuple(trace.notes),
        sources=sources(trace),
        definitions={name: sketch for p in reversed(trace.processes) for name, sketch in p.definitions.items()},
    )


# -- opening ---------------------------------------------------------------------------------------------------------


class _Held:
    """Traces that this process read last, bounded by their size."""

    def __init__(self) -> None:
        self.traces: OrderedDict[str, Trace] = OrderedDict()

    def open(self, shard: Shard, limit: int) -> Trace:
        if shard.trace is not None:
            return shard.trace
        trace = self.traces.pop(shard.key, None)
        if trace is None:
            trace = Trace.load(shard.paths, shard.window)
        self.traces[shard.key] = trace
        while len(self.traces) > 1 and sum(map(_size, self.traces.values())) > limit:
            self.traces.popitem(last=False)
        return trace


_held = _Held()


def open_shard(shard: Shard, held_bytes: int = HELD_BYTES) -> Trace:
    """The records of a shard; kept for the next visit as far as `held_bytes` allow.

    Raises:
        TraceError: it cannot be read.
    """
    return _held.open(shard, held_bytes)


def forget() -> None:
    """Let go of what was kept."""
    _held.traces.clear()


def _size(trace: Trace) -> int:
    """Bytes of a trace and, as far as it tells, of the views that relations keep with it."""
    own = sum(int(getattr(trace, t).estimated_size()) for t in _TABLES)
    return own + sum(int(v.estimated_size()) for v in trace.views.values() if isinstance(v, pl.DataFrame))


# -- one run of a trace ------------------------------------------------------------------------------------------------


def _of_run(trace: Trace, run: int) -> Trace:
    """The records of one run; codes of names stay what they are, processes are counted from 0."""
    mine = [i for i, p in enumerate(trace.processes) if p.run == run]
    number = np.zeros(len(trace.processes) + 1, dtype=np.uint16)
    number[mine] = np.arange(len(mine))
    chosen = pl.Series(mine, dtype=pl.UInt16).implode()

    def part(frame: pl.DataFrame) -> pl.DataFrame:
        if "proc" not in frame.columns:
            return frame
        frame = frame.filter(pl.col("proc").is_in(chosen))
        return frame.with_columns(pl.Series("proc", number[frame["proc"].to_numpy()], dtype=pl.UInt16))

    sub = replace(
        trace,
        processes=[msgspec.structs.replace(trace.processes[i], run=0) for i in mine],
        runs=[trace.runs[run]],
        calls=part(trace.calls),
        states=part(trace.states),
        values=part(trace.values),
        contexts=part(trace.contexts),
        notes=trace.notes if run == 0 else [],
    )
    sub.__dict__.update({k: trace.__dict__[k] for k in NAMES if k in trace.__dict__})
    return sub


def fingerprint(shard: Shard) -> bytes:
    """What run directories hold, as far as sizes and times of their files tell; to be hashed."""
    return b"\n\n".join(_fingerprint(Path(path)) for path in shard.paths)


def _fingerprint(path: Path) -> bytes:
    parts = []
    for file in sorted([path / "run.json", *path.glob("procs/*/process.json"), *(f for t in TABLES for f in path.glob(f"procs/*/{t}.arrow"))]):
        try:
            said = file.stat()
        except OSError:
            continue
        parts.append(f"{file.relative_to(path)} {said.st_size} {said.st_mtime_ns}")
    return "\n".join(parts).encode()


def table_bytes(path: Path) -> int:
    """Size of a run's tables on disk."""
    total = 0
    for name in _TABLES:
        for file in path.glob(f"procs/*/{name}.arrow"):
            try:
                total += file.stat().st_size
            except OSError:
                continue
    return total
