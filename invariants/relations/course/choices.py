"""What a right program seldom does, and may do on purpose: warnings where they ship, errors among the rules of a program's own (`relations/course`)."""

from __future__ import annotations

import re

import polars as pl

from proctor.invariants.relations.argument.tables import tables
from proctor.invariants.relations.course.loading import repeated
from proctor.invariants.relations.course.modes import EVAL, chancy, modes_set
from proctor.invariants.relations.course.updating import SCHEDULE, examples, fine
from proctor.invariants.relations.fresh import batches as _batches
from proctor.invariants.relations.habits import paced as _paced
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace


def advances(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step that trains on the batch of the step before though a loader that draws an order has given one since."""
    rows = repeated(trace)
    if not rows["_again"].any():
        return fine(trace, "advances", _batches.NEXT)
    bad = rows.filter(pl.col("_again") & (pl.col("_pass") == pl.col("_pass").shift(1).over("proc")).fill_null(value=False))
    bad = bad.select("proc", "step", "seq", pl.lit(0, dtype=pl.UInt32).alias("site"), pl.lit("the batch of the step before, though the loader has given one since").alias("_seen"))
    return examples(trace, "advances", bad, function=_batches.NEXT)


def examined(trace: Trace) -> pl.DataFrame:
    """One row an update, and each batch of a loader that no backward follows and that a model which drops out or normalises runs on in training mode."""
    if not evaluations(trace).height:
        return fine(trace, "examined", EVAL)
    bad = evaluations(trace).select("proc", "step", "seq", "site", pl.format("{} runs without gradients, on a batch that is not trained on, in training mode", "class").alias("_seen"), pl.col("class").alias("_variable"))
    return examples(trace, "examined", bad, function=EVAL)


def evaluations(trace: Trace) -> pl.DataFrame:
    """Forwards without gradients, in the training mode of the last backward, on a batch of a loader that no backward follows, of models that drop out or normalise: proc, seq, step, site, class, _earlier (seq of the last backward)."""
    return _frames.memo(trace, "evaluations in training mode", _evaluations)


def _evaluations(trace: Trace) -> pl.DataFrame:
    runs = tables(trace)["evaluating"].filter(~pl.col("passed") & (pl.col("step") >= 0))
    if not runs.height:
        return runs.with_columns(pl.lit(None, dtype=pl.UInt32).alias("_earlier"))
    runs = runs.join(chancy(trace), on=["proc", "class"], how="semi", maintain_order="left")
    nexts = _frames.calls_of(trace, re.escape(_batches.NEXT)).select("proc", "seq", pl.col("seq").alias("_given")).sort("seq")
    rows = runs.sort("seq").join_asof(nexts, on="seq", by="proc", strategy="backward", check_sortedness=False).drop_nulls("_given")
    later = nexts.select("proc", pl.col("seq").alias("_after"), pl.col("seq"))
    rows = rows.join_asof(later.sort("seq"), on="seq", by="proc", strategy="forward", check_sortedness=False)
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_backward")).sort("seq")
    rows = rows.join_asof(backwards, on="seq", by="proc", strategy="forward", check_sortedness=False)
    # What was given and not trained on before the next was asked for; of the last one, what follows is not known.
    rows = rows.filter(pl.col("_after").is_not_null() & (pl.col("_backward").is_null() | (pl.col("_backward") > pl.col("_after"))))
    first = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_earlier")).sort("seq")
    rows = rows.join_asof(first, on="seq", by="proc", strategy="backward", check_sortedness=False)
    rows = rows.filter((pl.col("_earlier") < pl.col("_given")).fill_null(value=False))
    # Who sets it to train for the purpose, as an update of batch statistics does, means it.
    modes = modes_set(trace).select("proc", "class", "seq", pl.col("seq").alias("_set")).sort("seq")
    rows = rows.sort("seq").join_asof(modes, on="seq", by=["proc", "class"], strategy="backward", check_sortedness=False)
    return rows.filter((pl.col("_set") < pl.col("_earlier")).fill_null(value=True)).drop("_set").sort("proc", "seq")


def scheduled(trace: Trace) -> pl.DataFrame:
    """One row an update, and each of a second pass over the data whose optimizer has one scheduler, which has never stepped."""
    late = _paced.epochs(trace).filter(~pl.col("passed")).rename({"_variable": "scheduler"})
    if not late.height:
        return fine(trace, "scheduled", SCHEDULE)
    steps = _paced.schedules(trace).group_by("proc", "scheduler").len("_n").with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    alone = steps.filter((pl.len().over("proc", "optimizer") == 1) & (pl.col("_n") == 1))
    bad = late.join(alone, on=["proc", "scheduler"], how="semi", maintain_order="left")
    bad = bad.select("proc", "step", "seq", "site", pl.format("{} has never stepped, in a second pass over the data", "what").alias("_seen"), pl.col("scheduler").alias("_variable"))
    return examples(trace, "scheduled", bad, function=SCHEDULE)


def steered(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step in which two schedulers of a kind step one optimizer, while another one of its class that updates as well has none.

    A scheduler that is made of others (`SequentialLR`) steps them within its own step, and counts as one.
    """
    steps = _paced.schedules(trace).with_columns(pl.col("scheduler").str.split("~").list.first().alias("optimizer"))
    trains = pl.col("step") >= 0
    two = steps.filter(trains).group_by("proc", "step", "optimizer", "kind", maintain_order=True).agg(pl.col("scheduler").n_unique().alias("_n"), pl.col("scheduler", "seq", "site").last())
    two = two.filter(pl.col("_n") > 1)
    if not two.height:
        return fine(trace, "steered", SCHEDULE)
    updates = _frames.updates(trace).filter(trains).drop_nulls(["optimizer", "kind"]).select("proc", "optimizer", pl.col("kind").alias("_class")).unique(maintain_order=True)
    free = updates.join(steps, on=["proc", "optimizer"], how="anti", maintain_order="left").rename({"optimizer": "_free"})
    free = free.unique(["proc", "_class"], keep="first", maintain_order=True)
    bad = two.join(updates, on=["proc", "optimizer"], maintain_order="left").join(free, on=["proc", "_class"], maintain_order="left")
    bad = bad.unique(["proc", "step"], keep="first", maintain_order=True)
    said = [pl.col(name).str.split(".").list.last() for name in ("kind", "_class")]
    seen = pl.format("{} schedulers {} step the {} {}, and none steps the {} {}", "_n", said[0], said[1], "optimizer", said[1], "_free")
    return examples(trace, "steered", bad.select("proc", "step", "seq", "site", seen.alias("_seen"), pl.col("scheduler").alias("_variable")), function=SCHEDULE)
