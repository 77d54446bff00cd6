"""What a right program seldom does, and may do on purpose: warnings where they ship, errors among the rules of a program's own (`relations/course`)."""

from __future__ import annotations

import re

import polars as pl

from proctor.invariants.relations.argument.tables import tables
from proctor.invariants.relations.course.modes import chancy
from proctor.invariants.relations.course.updating import BACKWARDS, SCHEDULE, examples
from proctor.invariants.relations.fresh import batches as _batches
from proctor.invariants.relations.habits import paced as _paced
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace


def advances(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step that trains on the batch of the step before though a loader that draws an order has given one since."""
    nexts = _frames.calls_of(trace, re.escape(_batches.NEXT)).select("proc", "seq", pl.col("seq").alias("_given")).sort("seq")
    begun = _frames.calls_of(trace, re.escape(_batches.ITER)).select("proc", "seq", pl.col("seq").alias("_pass")).sort("seq")
    drawn = _frames.calls_of(trace, *map(re.escape, _batches.DRAWS)).select("proc", "seq").sort("seq")
    drawn = drawn.join_asof(begun, on="seq", by="proc", strategy="backward", check_sortedness=False).select("proc", "_pass").drop_nulls().unique()
    rows = _batches.batches(trace).filter(~pl.col("flat") & (pl.col("step") >= 0) & (pl.col("numbers") >= _batches.ENOUGH))
    rows = rows.sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True).sort("seq")
    for calls in (nexts, begun):
        rows = rows.join_asof(calls, on="seq", by="proc", strategy="backward", check_sortedness=False)
    rows = rows.join(drawn, on=["proc", "_pass"], how="semi", maintain_order="left").sort("proc", "seq")
    before = {c: pl.col(c).shift(1).over("proc") for c in ("seq", "step", "session", "_pass", "fp")}
    again = (pl.col("fp") == before["fp"]) & (pl.col("_given") > before["seq"]) & (pl.col("step") == before["step"] + 1)
    bad = rows.filter(again & (pl.col("session") == before["session"]) & (pl.col("_pass") == before["_pass"]))
    bad = bad.select("proc", "step", "seq", pl.lit(0, dtype=pl.UInt32).alias("site"), pl.lit("the batch of the step before, though the loader has given one since").alias("_seen"))
    return examples(trace, "advances", bad, function=_batches.NEXT)


def examined(trace: Trace) -> pl.DataFrame:
    """One row an update, and each batch of a loader that no backward follows and that a model which drops out or normalises runs on in training mode."""
    runs = tables(trace)["evaluating"].filter(~pl.col("passed") & (pl.col("step") >= 0) & pl.col("proc").is_in(chancy(trace).implode()))
    nexts = _frames.calls_of(trace, re.escape(_batches.NEXT)).select("proc", "seq", pl.col("seq").alias("_given")).sort("seq")
    rows = runs.sort("seq").join_asof(nexts, on="seq", by="proc", strategy="backward", check_sortedness=False).drop_nulls("_given")
    later = nexts.select("proc", pl.col("seq").alias("_after"), pl.col("seq"))
    rows = rows.join_asof(later.sort("seq"), on="seq", by="proc", strategy="forward", check_sortedness=False)
    backwards = _frames.calls_of(trace, *map(re.escape, BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_backward")).sort("seq")
    rows = rows.join_asof(backwards, on="seq", by="proc", strategy="forward", check_sortedness=False)
    # What was given and not trained on before the next was asked for; of the last one, what follows is not known.
    rows = rows.filter(pl.col("_after").is_not_null() & (pl.col("_backward").is_null() | (pl.col("_backward") > pl.col("_after"))))
    first = _frames.calls_of(trace, *map(re.escape, BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_earlier")).sort("seq")
    rows = rows.join_asof(first, on="seq", by="proc", strategy="backward", check_sortedness=False)
    bad = rows.filter((pl.col("_earlier") < pl.col("_given")).fill_null(value=False)).sort("proc", "seq")
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} runs without gradients, on a batch that is not trained on, in training mode", "class").alias("_seen"), pl.col("class").alias("_variable"))
    return examples(trace, "examined", bad, function="torch.nn.Module.eval")


def scheduled(trace: Trace) -> pl.DataFrame:
    """One row an update, and each of a second pass over the data whose optimizer has one scheduler, which has never stepped."""
    late = _paced.epochs(trace).filter(~pl.col("passed")).rename({"_variable": "scheduler"})
    steps = _paced.schedules(trace).group_by("proc", "scheduler").len("_n").with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    alone = steps.filter((pl.len().over("proc", "optimizer") == 1) & (pl.col("_n") == 1))
    bad = late.join(alone, on=["proc", "scheduler"], how="semi", maintain_order="left")
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} has never stepped, in a second pass over the data", "what").alias("_seen"), pl.col("scheduler").alias("_variable"))
    return examples(trace, "scheduled", bad, function=SCHEDULE)
