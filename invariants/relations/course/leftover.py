"""Gradients that another optimizer's backward left behind (`relations/course`).

Of a loop that trains parts in turn: the backward for the generator gives the discriminator gradients as well, and nobody clears them before its own
(Lightning issue 591). A loop that accumulates on purpose updates behind the last of its backwards whom it updated behind the earlier ones, too.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import (
    by_holder,
    examples,
    fine,
    gradients,
    moment,
)
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_GONE: Final = int(StateFlag.NONE | StateFlag.ZERO)
_ZEROED: Final = r"torch\.Tensor\.(zero_|fill_)"


def leftover(trace: Trace) -> pl.DataFrame:
    """One row an update: failed if it applies what two backwards gave a parameter, of which the first was for other optimizers, and the second was not for these.

    A backward is for the optimizers that step between it and the next one.
    """
    if _frames.updates(trace)["optimizer"].n_unique() < 2:  # nobody else's gradients
        return fine(trace, "leftover", _frames.UPDATE)
    backwards = _backwards(trace)
    inner = _frames.inner_backwards(trace).select("proc", pl.col("update").alias("seq")).unique()
    updates = _frames.updates(trace).drop_nulls("optimizer").join(inner, on=["proc", "seq"], how="anti").select("proc", "optimizer", "seq", "step", "site").sort("seq")
    updates = updates.join_asof(backwards.with_columns(pl.col("back").alias("seq")), on="seq", by="proc", check_sortedness=False).drop_nulls("back")
    pairs = _pairs(trace, backwards)
    # Who steps behind each of the two backwards; nobody behind the first is an accumulation.
    whose = updates.group_by("proc", "back").agg(pl.col("optimizer").unique().sort().alias("_whose"))
    first = whose.rename({"back": "_first", "_whose": "_others"})
    rows = updates.join(pairs, on=["proc", "optimizer", "back"]).join(first, on=["proc", "_first"]).join(whose, on=["proc", "back"])
    rows = rows.filter(~pl.col("_others").list.contains(pl.col("optimizer")) & (pl.col("_others").list.set_intersection("_whose").list.len() == 0))
    rows = rows.group_by("proc", "optimizer", "seq").agg(pl.col("step", "site", "name", "_others").first(), pl.len().alias("_n")).sort("proc", "seq")
    rows = rows.filter(pl.col("step") >= 0)
    said = pl.format(
        "{} steps with gradients of {} parameters, such as {}, to which the backward before, behind which {} stepped, had added, and which nothing cleared in between",
        "optimizer", "_n", "name", pl.col("_others").list.join(", "),
    )  # fmt: skip
    bad = rows.select("proc", "step", "seq", "site", said.alias("_seen"), pl.col("name").alias("_variable"))
    return examples(trace, "leftover", bad, function=_frames.UPDATE)


def _backwards(trace: Trace) -> pl.DataFrame:
    """Backwards that no other one runs: proc, back (its seq), _step."""
    found = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).sort("proc", "seq")
    within = pl.col("t") < (pl.col("t") + pl.col("dur")).cum_max().shift(1).over("proc")
    return found.filter(~within.fill_null(value=False)).select("proc", pl.col("seq").alias("back"), pl.col("step").alias("_step")).sort("back")


def _pairs(trace: Trace, backwards: pl.DataFrame) -> pl.DataFrame:
    """Parameters that two backwards, one after the other, gave a gradient, with no clearing in between that could be seen: proc, optimizer, name, _first, back."""
    grads = gradients(trace)
    full = (pl.col("flags") & _GONE) == 0
    wrote = grads.filter((pl.col("edge") == 1) & full).join(backwards, left_on=["proc", "call"], right_on=["proc", "back"], how="inner")
    near = pl.col("_step") - pl.col("_step").shift(1).over("proc", "var") <= 1
    wrote = wrote.sort("proc", "var", "moment").with_columns(
        pl.col("call", "moment").shift(1).over("proc", "var").name.prefix("_before_"), near.alias("_near")
    ).filter("_near")  # fmt: skip
    gone = grads.filter(~full).select("proc", "var", "moment", pl.col("moment").alias("_gone")).sort("moment")
    hidden = _frames.calls_of(trace, _ZEROED).select("proc", moment(pl.lit(1))).with_columns(pl.col("moment").alias("_hidden")).sort("moment")
    wrote = wrote.sort("moment").join_asof(gone, on="moment", by=["proc", "var"], check_sortedness=False).join_asof(hidden, on="moment", by="proc", check_sortedness=False)
    kept = wrote.filter(~((pl.col("_gone") > pl.col("_before_moment")).fill_null(value=False) | (pl.col("_hidden") > pl.col("_before_moment")).fill_null(value=False)))
    return by_holder(kept).select("proc", "optimizer", "name", pl.col("_before_call").alias("_first"), pl.col("call").alias("back"))
