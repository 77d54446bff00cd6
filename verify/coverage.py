"""What a trace could not show: missing ranks, lost records, processes that were cut off.

Absence of a record is evidence only where every record was kept. Everything here turns "it did not happen" into
"unknown" where that does not hold; it never turns anything into a violation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.trace import Trace
from proctor.verify.wording import count, ranges

_MAX_LISTED = 4096  # missing ranks listed per run


@dataclass(frozen=True)
class Coverage:
    """Which parts of a trace can be judged.

    missing: per run, ranks of its world that left no record (bounded list).
    dropped: processes that lost records.
    horizon: for a process that never said goodbye, the step from which records may be missing.
    unobserved: for a process, functions that may have been called without a record.
    """

    missing: dict[int, list[int]]
    dropped: frozenset[int]
    horizon: dict[int, int]
    notes: list[str]
    unobserved: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every rank of every run left records."""
        return not self.missing

    def doubt(
        self, frame: pl.DataFrame, *, across_ranks: bool, runs: list[int], hypotheses: Sequence[Hypothesis] = ()
    ) -> pl.DataFrame:
        """Failures of a relation about absence become unknown where records may be missing.

        Args:
            frame: examples; `proc`, `step` and `passed` are used.
            across_ranks: one example speaks of several ranks, so a loss on any rank of its run counts.
            runs: run of every process.
            hypotheses: those that `hyp` of the examples counts.
        """
        lossy = set(self.dropped)
        if across_ranks:
            hit = {runs[p] for p in self.dropped} | set(self.missing)
            lossy |= {p for p, run in enumerate(runs) if run in hit}
        doubtful = pl.lit(value=False)
        if lossy:
            doubtful = doubtful | pl.col("proc").is_in(sorted(lossy))
        if self.horizon:
            horizon = dict(self.horizon)
            if across_ranks:
                for run in set(runs):
                    cut = [s for p, s in self.horizon.items() if runs[p] == run]
                    horizon |= {p: min(cut) for p, r in enumerate(runs) if r == run and cut}
            edge = pl.col("proc").replace_strict(
                list(horizon), list(horizon.values()), default=None, return_dtype=pl.Int32
            )
            doubtful = doubtful | (pl.col("step") >= edge).fill_null(value=False)
        for proc, functions in self.unobserved.items():
            blind = [i for i, h in enumerate(hypotheses) if any(v in functions for _, v in h.params if isinstance(v, str))]
            if blind:
                doubtful = doubtful | (pl.col("hyp").is_in(blind) & (pl.col("proc") == proc))
        failed = pl.col("passed").eq_missing(pl.lit(value=False))
        return frame.with_columns(
            pl.when(failed & doubtful).then(pl.lit(None, dtype=pl.Boolean)).otherwise(pl.col("passed")).alias("passed")
        )


def coverage(trace: Trace, end: int | None = None) -> Coverage:
    """Judge what the trace can and cannot show.

    Args:
        end: of a run that goes on: the first step that is not over, in all processes.
    """
    missing: dict[int, list[int]] = {}
    notes = list(trace.notes)
    for run, name in enumerate(trace.runs):
        members = [p for p in trace.processes if p.run == run]
        if not members:
            continue
        world = max(p.world for p in members)
        present = {p.rank for p in members}
        absent = list(islice((r for r in range(world) if r not in present), _MAX_LISTED))
        if absent:
            missing[run] = absent
            where = f" in {name}" if len(trace.runs) > 1 else ""
            noun = "rank" if len(absent) == 1 else "ranks"
            notes.append(f"{noun} {ranges(absent)} of {world}{where} left no record; rules across ranks are incomplete")
    dropped = frozenset(i for i, p in enumerate(trace.processes) if p.dropped > 0)
    for i in sorted(dropped):
        p = trace.processes[i]
        notes.append(
            f"rank {p.rank} lost {count(p.dropped, 'record')}; that something did not happen there is unknown, not a violation"
        )
    horizon = _horizon(trace) if end is None else dict.fromkeys(range(len(trace.processes)), end)
    if horizon and end is None:
        cut = ranges(trace.processes[i].rank for i in horizon)
        notes.append(
            f"rank {cut} did not finish (killed, or still running); that something did not happen "
            f"from step {min(horizon.values())} on is unknown"
        )
    unobserved = {i: frozenset(p.unobserved) for i, p in enumerate(trace.processes) if p.unobserved}
    return Coverage(missing, dropped, horizon, notes, unobserved)


def _horizon(trace: Trace) -> dict[int, int]:
    """Last step that each unfinished process recorded whole tables for: tables are cut independently."""
    unfinished = [i for i, p in enumerate(trace.processes) if not p.finished]
    horizon: dict[int, int] = {}
    if not unfinished:
        return horizon
    steps = trace.contexts.select("ctx", "step")
    for table in (trace.calls, trace.states):
        last = (
            table.select("proc", "ctx")
            .unique()
            .filter(pl.col("proc").is_in(unfinished))
            .join(steps, on="ctx", how="inner")
            .group_by("proc")
            .agg(pl.col("step").max())
        )
        for proc, step in last.drop_nulls().iter_rows():
            horizon[proc] = min(step, horizon.get(proc, step))
    return horizon
