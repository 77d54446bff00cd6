"""Updates and steps of schedulers that do nothing, or the same once more (`relations/course`)."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import CallFlag, StateFlag
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import PROLOGUE

SCHEDULE: Final = "torch.optim.lr_scheduler.LRScheduler.step"
MADE: Final = "torch.optim.lr_scheduler.LRScheduler.__init__"
# What a scheduler, or its optimizer, may be behind: steps that are made up for follow.
RESETS: Final = ("torch.optim.Optimizer.load_state_dict", "torch.optim.lr_scheduler.LRScheduler.load_state_dict", "torch.load")
_SCALED: Final = "torch.amp.GradScaler.step"
WHAT: Final = "updates"
_EMPTY: Final = int(StateFlag.NONE)


def moment(edge: pl.Expr) -> pl.Expr:
    """Orders what was seen after a call behind what was seen before it."""
    return (2 * pl.col("seq").cast(pl.Int64) + (edge == 1).cast(pl.Int64)).alias("moment")


def examples(trace: Trace, mode: str, bad: pl.DataFrame, *, function: str, of: pl.DataFrame | None = None) -> pl.DataFrame:
    """Failing rows (proc, step, seq, site, _seen, and perhaps _variable) beside what passes: `of`, or the updates that no failure belongs to."""
    if not bad.height and of is None:
        return fine(trace, mode, function)
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    good = _updates(trace) if of is None else _whens(of)
    good = good.join(bad, on=["proc", "step"], how="anti", maintain_order="left")
    bad = bad.with_columns(pl.when(~lossy).then(pl.lit(value=False)).alias("passed"))
    rows = pl.concat([good.with_columns(pl.lit(value=True).alias("passed")), bad], how="diagonal")
    return _sightings.example(_first(trace, rows), mode=mode, what=WHAT, _function=pl.lit(function))


def fine(trace: Trace, mode: str, function: str) -> pl.DataFrame:
    """What `examples` says of a mode that nothing failed: for views that see so before they have looked at everything, as in most windows of most programs."""
    return _frames.memo(trace, "updates that nothing is wrong with", _passing).with_columns(mode=pl.lit(mode), _function=pl.lit(function))


def _passing(trace: Trace) -> pl.DataFrame:
    """What `examples` says where nothing is wrong, but for mode and function: so it is of most modes in most windows."""
    rows = _first(trace, _updates(trace).with_columns(pl.lit(value=True).alias("passed")))
    return _sightings.example(rows, mode="", what=WHAT, _function="")


def _updates(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "when updates were", lambda t: _whens(_frames.updates(t)))


def _whens(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("step") >= 0).select("proc", "step", "seq", "site")


def _first(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    rows = rows.sort("proc", "step", "seq", maintain_order=True)
    return rows.filter(pl.int_range(pl.len()).over("proc", "passed", _frames.news(trace)) < _sightings.MANY)


def gradients(trace: Trace) -> pl.DataFrame:
    """Looks at gradients of what an optimizer holds, in order: proc, var, optimizer, holders ("#0,#2": all that hold it), name, moment, step, flags, fp, norm."""
    return _frames.memo(trace, "course gradients", _gradients)


def _gradients(trace: Trace) -> pl.DataFrame:
    names = trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")).select("var", "name")
    rows = _frames.rows(trace).join(names, on="var", how="inner", maintain_order="left")
    holders = _frames.metas(trace, "optimizer", "holders")
    rows = rows.join(holders, on="meta", how="left", maintain_order="left")
    # Looked at before it was held, it is the holder's all the same.
    holder = pl.col("optimizer").last().over("proc", "var")
    rows = rows.with_columns(pl.coalesce("optimizer", holder).alias("optimizer")).drop_nulls("optimizer")
    all_of = pl.coalesce("holders", "optimizer").last().over("proc", "var").alias("holders")
    return rows.with_columns(moment(pl.col("edge")), all_of).sort("proc", "moment", maintain_order=True)


def by_holder(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of `gradients`, one for each optimizer that holds the parameter: of what several hold, as an encoder that is trained by two losses, each may be the one that steps."""
    return rows.with_columns(pl.col("holders").str.split(",").alias("optimizer")).explode("optimizer")


def _moved(trace: Trace) -> pl.DataFrame:
    """Updates that moved a parameter: proc, seq."""
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    rows = _frames.rows(trace).filter((pl.col("edge") == 1) & pl.col("fresh")).join(about.select("var"), on="var", how="semi")
    inner = _frames.inner_backwards(trace).select("proc", pl.col("update").alias("seq"))
    return pl.concat([rows.select("proc", pl.col("call").alias("seq")), inner]).unique()


def fed(trace: Trace) -> pl.DataFrame:
    """One row an early update of an optimizer, but its first: failed if none of them had a gradient to apply, and none moved anything."""
    mine = ["proc", "optimizer"]
    early = _frames.updates(trace).drop_nulls("optimizer").sort("proc", "seq")
    # A window does not hold the first updates of an optimizer that begins late.
    nth = pl.int_range(pl.len()).over(mine)
    early = early.filter(nth < PROLOGUE) if trace.held is None else early.filter(pl.col("step") < PROLOGUE)
    if not early.height:
        return fine(trace, "fed", _frames.BACKWARDS[0])
    early = early.select(*mine, "seq", "step", "site", (2 * pl.col("seq").cast(pl.Int64)).alias("moment"))
    grads = gradients(trace)
    # The first looks tell what the optimizer holds; of one that holds nothing known, nothing is said.
    held = _held(trace)
    looks = early.join(grads.select(*mine, "var").unique(), on=mine).sort("moment").join_asof(
        grads.select("proc", "var", "moment", ((pl.col("flags") & _EMPTY) == 0).alias("_full")).sort("moment"), on="moment", by=["proc", "var"], strategy="backward", check_sortedness=False
    )  # fmt: skip
    # What an update sees at its own beginning is what it applies.
    begins = grads.filter((pl.col("edge") == 0) & ((pl.col("flags") & _EMPTY) == 0)).select("proc", "optimizer", pl.col("call").alias("seq"))
    has = pl.concat([looks.filter(pl.col("_full").fill_null(value=False)).select(*mine, "seq"), begins]).unique().with_columns(pl.lit(value=True).alias("_has"))
    rows = early.join(has, on=[*mine, "seq"], how="left", maintain_order="left").join(_moved(trace).with_columns(pl.lit(value=True).alias("_moves")), on=["proc", "seq"], how="left", maintain_order="left")
    works = pl.col("_has").fill_null(value=False) | pl.col("_moves").fill_null(value=False)
    rows = rows.with_columns(works.cum_max().over(mine).alias("_works"), pl.int_range(pl.len()).over(mine).alias("_nth")).join(held, on=mine, how="inner", maintain_order="left")
    begun = _frames.seen_steps(trace).filter(pl.col("step") == 0)["proc"]
    bad = rows.filter(~pl.col("_works") & (pl.col("_nth") > 0) & (pl.col("step") >= 0) & pl.col("proc").is_in(begun.implode()))
    bad = bad.select("proc", "step", "seq", "site", pl.format("update {} of {}: none of its {} parameters, such as {}, has or had a gradient, and none has moved", pl.col("_nth") + 1, "optimizer", "_n", "_variable").alias("_seen"), "_variable")
    return examples(trace, "fed", bad, function=_frames.BACKWARDS[0])


def _held(trace: Trace) -> pl.DataFrame:
    """What each optimizer holds that may train: proc, optimizer, _n, _variable (the first)."""
    known = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data")).select("var", "name")
    seen = trace.states.group_by("proc", "var", maintain_order=True).agg(pl.col("meta").last()).join(known, on="var", how="inner", maintain_order="left")
    seen = seen.join(_frames.metas(trace, "optimizer", "requires_grad"), on="meta", how="left", maintain_order="left")
    seen = seen.filter(pl.col("requires_grad") == "true").drop_nulls("optimizer")
    return seen.group_by("proc", "optimizer", maintain_order=True).agg(pl.len().alias("_n"), pl.col("name").first().alias("_variable"))


def again(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if it moved parameters by gradients that are those of the update before, with no backward and no change of one since."""
    mine = ["proc", "optimizer"]
    updates = _frames.updates(trace).drop_nulls("optimizer").sort("proc", "seq").join(_moved(trace), on=["proc", "seq"], how="semi", maintain_order="left")
    inner = _frames.inner_backwards(trace).select("proc", pl.col("update").alias("seq")).unique()
    updates = updates.join(inner, on=["proc", "seq"], how="anti", maintain_order="left").select(*mine, "seq", "step", "site")
    before = pl.col("seq").shift(1).over(mine).alias("_before")
    rows = updates.with_columns(before, (pl.col("step") <= pl.col("step").shift(1).over(mine) + 1).alias("_near")).filter(pl.col("_near").fill_null(value=False))
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS), r"torch\.autograd\.grad").select("proc", "seq", pl.col("seq").alias("_backward"))
    rows = rows.sort("seq").join_asof(backwards.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False)
    rows = rows.filter((pl.col("_backward") <= pl.col("_before")).fill_null(value=False)).with_columns((2 * pl.col("seq").cast(pl.Int64)).alias("moment"))
    if not rows.height:
        return fine(trace, "again", _frames.UPDATE)
    # Looks at the update's own beginning have its number.
    grads = gradients(trace).with_columns(pl.when(pl.col("edge") == 0).then(2 * pl.col("call").cast(pl.Int64)).otherwise("moment").alias("moment")).sort("moment")
    last = grads.select(*mine, "moment", pl.col("moment").alias("_look"))
    rows = rows.sort("moment").join_asof(last, on="moment", by=mine, strategy="backward", check_sortedness=False)
    full = grads.filter((pl.col("flags") & int(StateFlag.NONE | StateFlag.ZERO)) == 0).select(*mine, pl.lit(value=True).alias("_full")).unique()
    rows = rows.join(full, on=mine, how="semi", maintain_order="left")
    bad = rows.filter((pl.col("_look") <= 2 * pl.col("_before").cast(pl.Int64) + 1).fill_null(value=False)).sort("proc", "seq")
    bad = bad.filter(pl.col("step") >= 0).select("proc", "step", "seq", "site", pl.format("{} steps a second time with the gradients of its last step, and no backward ran in between", "optimizer").alias("_seen"))
    return examples(trace, "again", bad, function=_frames.UPDATE)


def successive(trace: Trace) -> pl.DataFrame:
    """Steps of a scheduler that follow its last one with no forward, backward or update in between, in a process of one rank."""
    calls = _frames.calls_of(trace, re.escape(SCHEDULE))
    if not calls.height:
        return fine(trace, "successive", SCHEDULE)
    calls = calls.join(_frames.arguments(trace, calls["args"], scheduler="0.name", kind="0.type"), on="args", how="left", maintain_order="left")
    calls = calls.filter(_outermost(trace, calls)).drop_nulls(["scheduler", "kind"]).sort("proc", "seq")
    # Several ranks may share one schedule of samples, and a loss scaler skips updates.
    alone = [i for i, p in enumerate(trace.processes) if p.world == 1]
    scaled = trace.calls.filter(pl.col("fn") == trace.function_code.get(_SCALED, -1))["proc"].unique()
    calls = calls.filter(pl.col("proc").is_in(alone) & ~pl.col("proc").is_in(scaled.implode()))
    mine = ["proc", "scheduler", "kind"]
    rows = calls.with_columns(pl.col("seq").shift(1).over(mine).alias("_before"), pl.col("step").shift(1).over(mine).alias("_beforestep"))
    rows = rows.filter((pl.col("step") == pl.col("_beforestep")).fill_null(value=False) & (pl.col("step") >= 0))
    if not rows.height:
        return fine(trace, "successive", SCHEDULE)
    acts = _frames.calls_of(trace, *map(re.escape, (*_frames.BACKWARDS, _frames.UPDATE, MADE, *RESETS))).select("proc", "seq")
    models = trace.calls.filter(_frames.has(int(CallFlag.ROOT))).select("proc", "seq")
    others = pl.concat([acts, models]).with_columns(pl.col("seq").alias("_act")).sort("seq")
    rows = rows.sort("seq").join_asof(others, on="seq", by="proc", strategy="backward", check_sortedness=False).sort("proc", "seq")
    # Before anything trained with a new scheduler, steps are made up for, as when a job resumes.
    rows = rows.filter(pl.col("_act") < pl.col("_before")).drop("_act")
    for functions, last in (((MADE,), "_made"), ((_frames.UPDATE,), "_updated")):
        found = _frames.calls_of(trace, *map(re.escape, functions)).select("proc", "seq", pl.col("seq").alias(last)).sort("seq")
        rows = rows.sort("seq").join_asof(found, on="seq", by="proc", strategy="backward", check_sortedness=False)
    bad = rows.filter((pl.col("_updated") > pl.col("_made")).fill_null(pl.col("_updated").is_not_null())).sort("proc", "seq")
    bad = bad.select("proc", "step", "seq", "site", pl.format("a second step of {} right behind the one before", "kind").alias("_seen"), pl.col("scheduler").alias("_variable"))
    return examples(trace, "successive", bad, function=SCHEDULE)


def _outermost(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Calls that are in no other scheduler's step: a chain of schedulers is one."""
    code = trace.function_code.get(SCHEDULE, -1)
    up, fn = _frames.enclosing(trace), trace.calls["fn"].to_numpy()
    inside: np.ndarray[Any, Any] = np.zeros(len(fn), dtype=bool)
    at = up.copy()
    for _ in range(4):
        known = at >= 0
        inside |= known & (fn[np.maximum(at, 0)] == code)
        at = np.where(known, up[np.maximum(at, 0)], -1)
    inner = trace.calls.select("proc", "seq").filter(pl.Series(inside)).with_columns(pl.lit(value=True).alias("_inner"))
    return calls.join(inner, on=["proc", "seq"], how="left", maintain_order="left")["_inner"].is_null()
