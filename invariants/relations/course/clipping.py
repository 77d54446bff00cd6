"""Clipping that is done at the wrong place, or does nothing (`relations/course`)."""

from __future__ import annotations

import math
import re
from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import by_holder, examples, fine, gradients
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace

CLIP: Final = "torch.nn.utils.clip_grad_norm_"
_CLEARLY: Final = 1.02  # times the norm that was asked for
_PLACES: Final = ("1.value", "max_norm.value")
_KINDS: Final = ("2.value", "norm_type.value")


def clips(trace: Trace) -> pl.DataFrame:
    """One row an update, or step where none is called: failed if something is clipped before the first backward of it, and nothing behind."""
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "step", "seq")
    clipped = _limited(trace).select("proc", "step", "seq", "site")
    ends = _frames.updates(trace)
    if not clipped.height and ends.height:
        return fine(trace, "clips", CLIP)
    # With a closure, the backward is inside of the update.
    inner = _frames.inner_backwards(trace)["proc"].unique()
    ends = ends.filter(~pl.col("proc").is_in(inner.implode())).select("proc", "seq", pl.col("seq").alias("_end"), pl.col("step").alias("_step")).sort("seq")
    parts = []
    for calls in (backwards, clipped):
        held = calls.filter(~pl.col("proc").is_in(inner.implode())).sort("seq").join_asof(ends, on="seq", by="proc", strategy="forward", check_sortedness=False)
        # Without an optimizer of torch a step is what lies between two updates.
        by_hand = ~pl.col("proc").is_in(ends["proc"].unique().implode())
        parts.append(held.with_columns(pl.when(by_hand).then(pl.col("step").cast(pl.Int64)).otherwise(pl.col("_end").cast(pl.Int64)).alias("_of")).drop_nulls("_of"))
    begun = parts[0].group_by("proc", "_of").agg(pl.col("seq").min().alias("_backward"))
    done = parts[1].group_by("proc", "_of").agg(pl.col("seq", "step", "site", "_step").sort_by("seq").last())
    rows = done.join(begun, on=["proc", "_of"], how="inner").join(_frames.whole_steps(trace), on=["proc", "step"], how="semi")
    near = (pl.col("_step") <= pl.col("step") + 1).fill_null(value=True)
    bad = rows.filter((pl.col("seq") < pl.col("_backward")) & near & (pl.col("step") >= 0)).sort("proc", "seq")
    bad = bad.select("proc", "step", "seq", "site", pl.lit("gradients are clipped before the backward that the next update uses, and not behind it").alias("_seen"))
    return examples(trace, "clips", bad, function=CLIP, of=None if not _by_hand(trace) else _steps(trace))


def _by_hand(trace: Trace) -> bool:
    return _frames.updates(trace).is_empty()


def _steps(trace: Trace) -> pl.DataFrame:
    """Backwards, which stand for steps: proc, step, seq, site."""
    return _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "step", "seq", "site").unique(["proc", "step"], keep="first", maintain_order=True)


def _limited(trace: Trace) -> pl.DataFrame:
    """Clippings to a finite norm; those to none only measure: the columns of calls, most, and two: whether it is the usual norm."""
    return _frames.memo(trace, "clippings to a norm", _find_limited)


def _find_limited(trace: Trace) -> pl.DataFrame:
    calls = _frames.calls_of(trace, re.escape(CLIP))
    told = []
    for code in calls["args"].unique().to_list():
        given = trace.features[code]
        most = next((given[p] for p in _PLACES if p in given), None)
        kind = next((given[p] for p in _KINDS if p in given), 2.0)
        two = isinstance(kind, int | float) and float(kind) == 2.0
        told.append((code, float(most) if isinstance(most, int | float) and math.isfinite(most) and most < 1e6 else None, two))
    known = pl.DataFrame(told, schema={"args": pl.UInt32, "most": pl.Float64, "two": pl.Boolean}, orient="row")
    calls = calls.join(known, on="args", how="left", maintain_order="left").drop_nulls("most")
    # One that the update itself does is of that update alone.
    return calls.join(_frames.inner_clippings(trace).select("proc", pl.col("call").alias("seq")), on=["proc", "seq"], how="anti", maintain_order="left")


def reaches(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if updates follow a clipping before the next backward, and none of them is of an optimizer that holds a gradient which the clipping changed.

    Who clips what several optimizers hold, and steps one of them, applies some of it. Without an update before the next backward nothing is said.
    """
    if not _limited(trace).height:
        return fine(trace, "reaches", CLIP)
    inner = _frames.inner_backwards(trace)["proc"].unique()
    limited = _limited(trace).filter((pl.col("step") >= 0) & ~pl.col("proc").is_in(inner.implode()))
    changed = by_holder(gradients(trace).filter(pl.col("edge") == 1)).select("proc", pl.col("call").alias("seq"), "name", "optimizer")
    rows = limited.select("proc", "step", "seq", "site").join(changed, on=["proc", "seq"], how="inner", maintain_order="left")
    clipped = rows.unique(["proc", "seq"], keep="first", maintain_order=True).drop("optimizer").sort("seq")
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_next")).sort("seq")
    clipped = clipped.join_asof(backwards, on="seq", by="proc", strategy="forward", check_sortedness=False)
    updates = _frames.updates(trace).select("proc", pl.col("seq").alias("_update"), pl.col("optimizer").alias("_by"))
    between = (pl.col("_update") > pl.col("seq")) & (pl.col("_update") < pl.col("_next").fill_null((1 << 32) - 1))
    followed = clipped.join(updates, on="proc", how="inner").filter(between)
    mine = rows.select("proc", "seq", pl.col("optimizer").alias("_by")).unique()
    applied = followed.join(mine, on=["proc", "seq", "_by"], how="semi").select("proc", "seq").unique()
    bad = followed.unique(["proc", "seq"], keep="first").sort("proc", "seq").join(applied, on=["proc", "seq"], how="anti", maintain_order="left")
    said = pl.format("clipping changed gradients, such as that of {}, which no update before the next backward applies", "name")
    return examples(trace, "reaches", bad.select("proc", "step", "seq", "site", said.alias("_seen"), pl.format("{}.grad", "name").alias("_variable")), function=CLIP)


def shrinks(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if a clipping found a greater norm than it was to leave, and changed no gradient."""
    if not _limited(trace).height:
        return fine(trace, "shrinks", CLIP)
    clipped = _limited(trace).filter("two")
    found = trace.values.filter(pl.col("kind") == int(Value.CLIPPED)).select("proc", "seq", pl.col("number").alias("_norm"))
    rows = clipped.join(found, on=["proc", "seq"], how="inner", maintain_order="left").filter(pl.col("step") >= 0)
    rows = rows.filter((pl.col("_norm") > pl.col("most") * _CLEARLY) & pl.col("_norm").is_finite())
    # Of gradients that no optimizer of torch takes, looks are not taken at every call.
    looked = gradients(trace)["proc"].unique()
    changed = gradients(trace).filter(pl.col("edge") == 1).select("proc", pl.col("call").alias("seq")).unique()
    bad = rows.filter(pl.col("proc").is_in(looked.implode())).join(changed, on=["proc", "seq"], how="anti", maintain_order="left")
    bad = bad.select("proc", "step", "seq", "site", pl.format("clipping to {} found a norm of {} and changed no gradient", "most", pl.col("_norm").round_sig_figs(4)).alias("_seen"))
    return examples(trace, "shrinks", bad, function=CLIP)
