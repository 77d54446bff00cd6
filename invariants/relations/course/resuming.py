"""A program that goes on from a file updates with the rate that the file holds, whatever was built behind the load (`relations/course`)."""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import MADE, SCHEDULE, examples, fine
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace

OPTIMIZER_GIVEN: Final = "torch.optim.Optimizer.load_state_dict"
SCHEDULER_GIVEN: Final = "torch.optim.lr_scheduler.LRScheduler.load_state_dict"
_ROUNDING: Final = 1e-9  # relative


def rebuilt(trace: Trace) -> pl.DataFrame:
    """One row an update, and each first one after a load whose rate is not the loaded one, as a scheduler was built after the load and then given a state.

    The scheduler's state says that the program goes on; who loads an optimizer to begin another schedule gives its scheduler none. A step of
    a scheduler behind its load may set another rate rightly, so such updates are no examples.
    """
    if not _frames.calls_of(trace, re.escape(SCHEDULER_GIVEN)).height:
        return fine(trace, "rebuilt", _frames.UPDATE)
    rows = _sightings.sightings(trace, Value.OPTION).join(_frames.metas(trace, "when"), on="meta", how="left", maintain_order="left")
    rows = rows.filter(pl.col("text") == "lr").join(trace.calls.select("proc", "seq", "args"), on=["proc", "seq"], how="inner", maintain_order="left")
    rows = rows.join(_frames.arguments(trace, rows["args"], held="0.name"), on="args", how="left", maintain_order="left").drop_nulls("held").sort("seq")
    key = ["proc", "held", "item"]
    given = rows.filter(pl.col("when") == "given").select(*key, "seq", pl.col("number").alias("_given"), pl.col("seq").alias("_load"))
    used = rows.filter(pl.col("when") == "update").join_asof(given, on="seq", by=key, strategy="backward", check_sortedness=False).drop_nulls("_load")
    # The update may repeat no number that has not moved: a rate that is read at a later one is not of the first.
    updates = _frames.updates(trace).select("proc", "seq", "site", pl.col("optimizer").alias("held"), pl.col("seq").alias("_update")).drop_nulls("held").sort("seq")
    first = given.select("proc", "held", "seq", "_load").unique().sort("seq")
    first = first.join_asof(updates.drop("site"), on="seq", by=["proc", "held"], strategy="forward", check_sortedness=False).drop_nulls("_update")
    used = used.join(first.select("proc", "held", "_load", "_update"), on=["proc", "held", "_load"], how="inner").filter(pl.col("seq") == pl.col("_update")).sort("seq")
    for function, last in ((MADE, "_made"), (SCHEDULER_GIVEN, "_told"), (SCHEDULE, "_stepped")):
        calls = _frames.calls_of(trace, re.escape(function)).select("proc", "seq", pl.col("seq").alias(last)).sort("seq")
        used = used.join_asof(calls, on="seq", by="proc", strategy="backward", check_sortedness=False)
    other = (pl.col("number") - pl.col("_given")).abs() > pl.col("_given").abs() * _ROUNDING
    went_on = (pl.col("_load") < pl.col("_made")) & (pl.col("_made") < pl.col("_told")) & ~(pl.col("_stepped") > pl.col("_told")).fill_null(value=False)
    bad = used.filter(other & went_on.fill_null(value=False)).join(updates.select("proc", "seq", "site"), on=["proc", "seq"], how="left", maintain_order="left")
    seen = pl.format("lr of group {} is {}, where the loaded state has {}: a scheduler was built behind the load", "item", pl.col("number").round_sig_figs(6), pl.col("_given").round_sig_figs(6))
    bad = bad.sort("proc", "seq").select("proc", "step", "seq", "site", seen.alias("_seen"), pl.format("lr of group {} of optimizer {}", "item", "held").alias("_variable"))
    return examples(trace, "rebuilt", bad, function=_frames.UPDATE)
