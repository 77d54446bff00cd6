"""Batches that come again, and batches that nobody trains on (`relations/course`)."""

from __future__ import annotations

import re

import polars as pl

from proctor.invariants.relations.course.updating import examples, fine
from proctor.invariants.relations.fresh import batches as _batches
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace


def batch(trace: Trace) -> pl.DataFrame:
    """One row an update, and each batch of a loader that is the one before it again, where the same pass has shown that its batches differ.

    A loader over one batch, or over samples that are all alike, shows no such difference. Nor is a batch of a few numbers an example, which may come
    again by chance.
    """
    loaded = _frames.calls_of(trace, re.escape(_batches.NEXT)).select("proc", "seq", pl.col("seq").alias("_next"))
    begun = _frames.calls_of(trace, re.escape(_batches.ITER)).select("proc", "seq", pl.col("seq").alias("_epoch"))
    if not loaded.height or not begun.height:
        return fine(trace, "batch", _batches.NEXT)
    rows = _batches.batches(trace).sort("seq")
    for calls in (loaded, begun):
        rows = rows.join_asof(calls.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False)
    rows = _batches.whole(trace, rows.sort("proc", "seq").drop_nulls(["_next", "_epoch"]))
    rows = rows.filter(~pl.col("flat") & (pl.col("numbers") >= _batches.ENOUGH))
    group = ["proc", "session", "_epoch"]
    same = _batches.again(1).over(group)
    # Batches that were seen one after the other: of a step without records nothing is known.
    near = (pl.col("step") <= pl.col("step").shift(1).over(group) + 1).fill_null(value=False)
    differed = (~same).fill_null(value=False).cum_max().over(group)
    bad = rows.with_columns((same & differed & near).fill_null(value=False).alias("_again")).filter(pl.col("_again") & (pl.col("step") >= 0))
    sites = trace.calls.select("proc", pl.col("seq").alias("_next"), "site")
    bad = bad.join(sites, on=["proc", "_next"], how="left", maintain_order="left").unique(["proc", "step"], keep="first", maintain_order=True)
    bad = bad.select("proc", "step", "seq", pl.col("site").fill_null(0), pl.lit("all of the batch before again, tensor by tensor, where earlier ones of this pass differed").alias("_seen"))
    return examples(trace, "batch", bad, function=_batches.NEXT)


def consumes(trace: Trace) -> pl.DataFrame:
    """One row an update, and each step whose training forwards are given what those of the steps before and after it are given, tensor by tensor, while a loader
    that draws an order has given another batch between each two of them.

    One such step may be meant, as of a search that goes back; three in a row are not trained on what the loop is given.
    """
    rows = repeated(trace)
    if not rows["_again"].any():
        return fine(trace, "consumes", _batches.NEXT)
    bad = rows.filter(pl.col("_again") & pl.col("_again").shift(-1).over("proc").fill_null(value=False))
    said = pl.lit("all of what the steps before and after it were given, though the loader gives another batch to each")
    bad = bad.select("proc", "step", "seq", pl.lit(0, dtype=pl.UInt32).alias("site"), said.alias("_seen"))
    return examples(trace, "consumes", bad, function=_batches.NEXT)


def repeated(trace: Trace) -> pl.DataFrame:
    """Steps by what all their training forwards are given: proc, step, seq, _pass, and _again: all of it is what the step before was given, and a loader that draws an order has given a batch since."""
    return _frames.memo(trace, "repeated batches", _repeated)


def _repeated(trace: Trace) -> pl.DataFrame:
    rows = _batches.batches(trace).filter((pl.col("step") >= 0) & ~pl.col("flat"))
    rows = rows.group_by("proc", "step", maintain_order=True).agg(
        pl.col("session", "seq").first(), _batches.every_forward().alias("_all"), pl.col("numbers").max(),
    ).filter(pl.col("numbers") >= _batches.ENOUGH).sort("proc", "step")  # fmt: skip
    drawn = _batches.drawn(trace)
    rows = rows.sort("seq").join_asof(drawn.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False).sort("proc", "step")
    same = ["session", "_all"]
    before = pl.all_horizontal(pl.col(c) == pl.col(c).shift(1).over("proc") for c in same) & (pl.col("step") == pl.col("step").shift(1).over("proc") + 1)
    given = (pl.col("_given") > pl.col("seq").shift(1).over("proc")) & pl.col("proc").is_in(_differing(trace).implode())
    return rows.with_columns((before & given).fill_null(value=False).alias("_again"))


def _differing(trace: Trace) -> pl.Series:
    """Processes whose loaders were seen to give what differs: a set of one sample, or of one that is repeated, gives the same again and again."""
    came = _sightings.sightings(trace, Value.HANDED).filter(pl.col("text").str.starts_with("loader"))
    several = came.group_by("proc", "text").agg(pl.col("fp").n_unique().alias("_n"), pl.col("seq").n_unique().alias("_times"))
    return several.filter((pl.col("_n") > 1) & (pl.col("_times") > 1))["proc"].unique()
