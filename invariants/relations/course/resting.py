"""Optimizers that never update (`relations/course`)."""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import examples, fine, gradients
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_TIMES: Final = 3  # gradients that were thrown away
_GONE: Final = int(StateFlag.NONE | StateFlag.ZERO)


def used(trace: Trace) -> pl.DataFrame:
    """One row an update, and each optimizer that never steps in a run that is over, though its own gradients were made and thrown away several times.

    A clearing that takes gradients of another optimizer, too, is not for this one, and what moves without it has another that steps.
    """
    if trace.held is not None:  # a window does not tell what happened never
        return fine(trace, "used", _frames.UPDATE)
    alone = cleared(trace)
    times = alone.sort("proc", "call").group_by("proc", "optimizer", maintain_order=True).agg(
        pl.len().alias("_times"), pl.col("step", "call", "name").slice(_TIMES - 1, 1).first()
    ).filter(pl.col("_times") >= _TIMES)  # fmt: skip
    stepped = _frames.updates(trace).select("proc", "optimizer").unique()
    over = [i for i, p in enumerate(trace.processes) if p.finished and not p.dropped]
    bad = times.join(stepped, on=["proc", "optimizer"], how="anti").join(_moves(trace), on=["proc", "optimizer"], how="anti").filter(pl.col("proc").is_in(over)).sort("proc", "call")
    sites = trace.calls.select("proc", pl.col("seq").alias("call"), "site")
    bad = bad.join(sites, on=["proc", "call"], how="left", maintain_order="left").with_columns(pl.col("site").fill_null(0), pl.col("call").alias("seq").cast(pl.UInt32), pl.col("step").clip(0))
    said = pl.format("{} never steps, and the gradients of its parameters, such as {}, were cleared {} times unused", "optimizer", "name", "_times")
    return examples(trace, "used", bad.select("proc", "step", "seq", "site", said.alias("_seen"), pl.col("name").alias("_variable")), function=_frames.UPDATE)


def cleared(trace: Trace) -> pl.DataFrame:
    """Calls that threw gradients of one optimizer away, and of no other: proc, call, optimizer, step, name (of one), seq."""
    grads = gradients(trace).with_columns(((pl.col("flags") & _GONE) == 0).alias("_full"))
    lost = grads.with_columns(pl.col("_full").shift(1).over("proc", "var").fill_null(value=False).alias("_was"))
    lost = lost.filter(~pl.col("_full") & pl.col("_was") & (pl.col("call") > 0))
    found = lost.group_by("proc", "call").agg(pl.col("optimizer").n_unique().alias("_n"), pl.col("optimizer", "step", "name").first(), pl.col("seq").min())
    return found.filter(pl.col("_n") == 1)


def _moves(trace: Trace) -> pl.DataFrame:
    """Optimizers of which a parameter moves in training, whoever moves it: a wrapper may hold what another steps (proc, optimizer)."""
    named = trace.variables.filter(pl.col("alias") == "").select("var", "model", "name", "attr")
    data, grads = (named.filter(pl.col("attr") == attr).drop("attr") for attr in ("data", "grad"))
    moved = _frames.data_by_step(trace).filter(pl.col("changed") & (pl.col("step") >= 0)).join(data, on="var").select("proc", "model", "name").unique()
    held = gradients(trace).select("proc", "var", "optimizer").unique().join(grads, on="var")
    return held.join(moved, on=["proc", "model", "name"], how="semi").select("proc", "optimizer").unique()
