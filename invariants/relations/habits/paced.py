"""A learning-rate schedule keeps the pace of its optimizer: one step of the scheduler for each update.

Held by programs all of whose runs keep it. Catches a scheduler that is stepped for each microbatch, twice in an update (by the loop
and by a library), by one rank more than by others, or not at all although others are. Source: ours; `sequence` (PR103) says only
that a scheduler is stepped in a step, not which one and how often.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations import habits as _habits
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.trace import Trace

_SCHEDULE: Final = "torch.optim.lr_scheduler.LRScheduler.step"
_PASS: Final = "torch.utils.data.DataLoader.__iter__"
_LEAST: Final = 4  # steps in which it was kept
_MODE: Final = "once"


@register
class Paced(Relation):
    """A scheduler steps once for each update."""

    name = "paced"
    code = "PR118"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 3
    reach: ClassVar[int | None] = 0
    reads: ClassVar[Reads] = "calls"
    alone: ClassVar[bool] = True
    absence: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        return _habits.survey(self.name, _every(trace).filter(~_once_a_pass(trace)), _LEAST)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _every(trace), hypotheses)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({_frames.UPDATE, _SCHEDULE, _PASS}))

    def say(self, hypothesis: Hypothesis) -> str:
        kind, _, ranks = hypothesis.text("what").partition(", ")
        where = f" of a job of {ranks}" if ranks else ""
        return f"a scheduler {kind.rpartition('.')[2]}{where} steps once for each update of its optimizer" + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return Detail(
            expected=example["_expected"] or "",
            seen=example["_seen"] or "",
            function=_SCHEDULE,
            variable=example["_variable"] or "",
            advice="Look at where scheduler.step() is called: once behind optimizer.step(), in the same branch, and not by a library as well.",
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "paced", {"once": _once})


def _once_a_pass(trace: Trace) -> pl.Expr:
    """Rows of processes in which a pass over the data is one update: a scheduler that steps once an epoch looks like one that steps
    once an update."""
    passes = _frames.calls_of(trace, re.escape(_PASS)).group_by("proc").len("passes")
    updates = _frames.updates(trace).group_by("proc").len("updates")
    procs = passes.join(updates, on="proc").filter(pl.col("passes") * 2 >= pl.col("updates"))["proc"]
    return pl.col("proc").is_in(procs.implode())


def _once(trace: Trace) -> pl.DataFrame:
    """One row a scheduler and step in which its optimizer updates: passed if it steps as often as the optimizer."""
    calls = _frames.calls_of(trace, re.escape(_SCHEDULE))
    calls = calls.join(_frames.arguments(trace, calls["args"], scheduler="0.name", kind="0.type"), on="args", how="left", maintain_order="left")
    calls = calls.filter(_outermost(trace, calls)).drop_nulls(["scheduler", "kind"]).sort("proc", "seq")
    # The first call is made by its constructor.
    mine = ["proc", "scheduler", "kind"]
    made = calls.group_by(mine, maintain_order=True).agg(pl.col("step").first().alias("_made"))
    stepped = calls.group_by(*mine, "step", maintain_order=True).agg(pl.len().alias("_n"), pl.col("seq", "site").last())
    updates = _frames.updates(trace).filter(pl.col("step") >= 0).drop_nulls("optimizer")
    updates = updates.group_by("proc", "optimizer", "step", maintain_order=True).agg(
        pl.len().alias("_updates"), pl.col("seq").last().alias("_at"), pl.col("site").last().alias("_line")
    )
    made = made.with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    rows = made.join(updates, on=["proc", "optimizer"], how="inner", maintain_order="left").filter(pl.col("step") > pl.col("_made"))
    rows = rows.join(stepped, on=[*mine, "step"], how="left", maintain_order="left")
    over = _frames.whole_steps(trace).join(_next(trace), on=["proc", "step"], how="semi")
    rows = rows.join(over, on=["proc", "step"], how="semi", maintain_order="left")
    lossy = [i for i, p in enumerate(trace.processes) if p.dropped > 0]
    worlds = pl.DataFrame({"proc": pl.Series(range(len(trace.processes)), dtype=pl.UInt16), "_ranks": ["" if p.world == 1 else f", {p.world} ranks" for p in trace.processes]}, schema_overrides={"_ranks": pl.String})
    n = pl.col("_n").fill_null(0)
    rows = rows.join(worlds, on="proc", how="left", maintain_order="left").with_columns(
        pl.when((n == pl.col("_updates")) | ~pl.col("proc").is_in(lossy)).then(n == pl.col("_updates")).alias("passed"),
        pl.concat_str("kind", "_ranks").alias("what"), pl.coalesce("seq", "_at").alias("seq"), pl.coalesce("site", "_line").alias("site"), n.alias("_n"),
    )  # fmt: skip
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "scheduler", "passed", _frames.news(trace)) < _sightings.MANY)
    return _sightings.example(
        _habits.with_family(trace, rows), mode=_MODE, _variable=pl.col("scheduler"),
        _expected=pl.format("{} step(s) of the scheduler for as many updates", "_updates"), _seen=pl.format("{} step(s) of the scheduler", "_n"),
    )  # fmt: skip


def _next(trace: Trace) -> pl.DataFrame:
    """Steps behind which the process has another: what follows the last update may not have come yet."""
    seen = _frames.seen_steps(trace)
    return seen.join(seen.select("proc", pl.col("step") - 1), on=["proc", "step"], how="semi")


def _outermost(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Calls that are in no other scheduler's step: a chain of schedulers is one."""
    code = trace.function_code.get(_SCHEDULE, -1)
    up, fn = _frames.enclosing(trace), trace.calls["fn"].to_numpy()
    inside = np.zeros(len(fn), dtype=bool)
    at = up.copy()
    for _ in range(4):
        known = at >= 0
        inside |= known & (fn[np.maximum(at, 0)] == code)
        at = np.where(known, up[np.maximum(at, 0)], -1)
    inner = trace.calls.select("proc", "seq").filter(pl.Series(inside))
    return calls.join(inner.with_columns(pl.lit(value=True).alias("_inner")), on=["proc", "seq"], how="left", maintain_order="left")["_inner"].is_null()
