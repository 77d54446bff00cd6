"""Which forwards in evaluation mode train their model, by the update that applies their gradients.

A discriminator that is set to evaluate while the generator trains, a model that is attacked, one that is evaluated with gradients: a backward follows their forwards, and no update of theirs.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import polars as pl

from proctor.invariants.relations.views import containment
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace

_MINE: Final = ["proc", "class"]


def training(trace: Trace, rows: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Forwards without those in evaluation mode that train nothing.

    One trains if the updates that follow its backward, up to the backward behind them, are by an optimizer that holds parameters of its class, and nothing of its class runs in
    training mode in them. Of a class that no optimizer is known to hold, but that runs modules of which one does, any update will do; in a process without optimizers a backward
    stands for the update.

    Args:
        trace: The trace.
        rows: proc, class, _seen ("true", "false"), _at (seq of the forward), seq (of the backward behind it).
        forwards: All forwards with gradients, of models and of others: proc, seq, class, _seen, has (whether it runs a module with parameters of a model), model (whether it is one).
    """
    bad = rows.filter(pl.col("_seen") == "false").select(*_MINE, "_at", "seq").unique(maintain_order=True)
    updates, held, numbered = _frames.updates(trace), _held(trace), backwards(trace)
    by_hand = ~pl.col("proc").is_in(pl.concat([updates["proc"], held["proc"]]).unique().implode())
    own = bad.filter(by_hand).join(numbered.with_columns(pl.col("seq").shift(1).over("proc").fill_null(0).alias("_before")), on=["proc", "seq"], how="left", maintain_order="left")
    bad = bad.filter(~by_hand).join(numbered, on=["proc", "seq"], how="left", maintain_order="left").sort("_nth")
    bad = bad.join_asof(_groups(updates, numbered), on="_nth", by="proc", strategy="forward", check_sortedness=False)
    undecided, bad = bad.filter(pl.col("_first").is_null()), bad.filter(pl.col("_first").is_not_null())
    beside = pl.concat([own.with_columns(pl.col("seq").alias("_first")), bad], how="diagonal")
    dropped = [frame.select("proc", "_at", "seq") for frame in (undecided, _without_holder(bad, held, forwards), _beside(beside, forwards))]
    return rows.join(pl.concat(dropped).unique(), on=["proc", "_at", "seq"], how="anti", maintain_order="left")


def _groups(updates: pl.DataFrame, numbered: pl.DataFrame) -> pl.DataFrame:
    """Updates between two backwards: proc, _nth (of the backward before them), optimizer (a list), _first (seq), _before (seq of the last update before)."""
    behind = updates.select("proc", "seq", "optimizer").sort("seq").join_asof(numbered.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False)
    groups = behind.with_columns(pl.col("_nth").fill_null(0)).group_by("proc", "_nth").agg("optimizer", pl.col("seq").min().alias("_first"), pl.col("seq").max().alias("_last"))
    return groups.sort("_nth").with_columns(pl.col("_last").shift(1).over("proc").fill_null(0).alias("_before")).drop("_last")


def _without_holder(bad: pl.DataFrame, held: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Those whose updates are by optimizers that hold none of the class, though one does; of a class that none holds, those that run nothing with parameters."""
    known = bad.join(held.select(_MINE).unique(), on=_MINE, how="semi").explode("optimizer")
    known = known.join(held.with_columns(_holds=True), on=["proc", "optimizer", "class"], how="left")
    told = known.group_by(*_MINE, "_at", "seq").agg((pl.col("_holds").fill_null(value=False) | pl.col("optimizer").is_null()).any())
    others = bad.join(held, on=_MINE, how="anti").join(forwards.filter("has").select("proc", pl.col("seq").alias("_at")), on=["proc", "_at"], how="anti")
    return pl.concat([frame.select("proc", "_at", "seq") for frame in (told.filter(~pl.col("_holds")), others)])


def _beside(bad: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Those of an update in which something of the class, or a part of a model, runs in training mode as well; a part only behind them."""
    trains = forwards.filter(pl.col("_seen") == "true").sort("seq")
    whole = trains.select(*_MINE, "seq", pl.col("seq").alias("_trains"))
    own = _last(bad, whole, _MINE).filter(pl.col("_trains") > pl.col("_before"))
    parts = trains.filter(pl.col("has") & ~pl.col("model")).select("proc", "seq", pl.col("seq").alias("_trains"))
    part = _last(bad, parts, ["proc"]).filter(pl.col("_trains") > pl.col("_at"))
    return pl.concat([frame.select("proc", "_at", "seq") for frame in (own, part)])


def _last(bad: pl.DataFrame, trains: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """With the last of these forwards before the update."""
    found = bad.with_columns(pl.col("_first").alias("_update")).sort("_update")
    return found.join_asof(trains, left_on="_update", right_on="seq", by=by, strategy="backward", check_sortedness=False, coalesce=False).with_columns(pl.col("_trains").fill_null(0)).drop("seq_right")


def backwards(trace: Trace) -> pl.DataFrame:
    """Outermost ones, for that of a tensor calls the other: proc, seq, _nth (from 1)."""
    every = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", "parent")
    found = every.join(every.select("proc", pl.col("seq").alias("parent")), on=["proc", "parent"], how="anti").select("proc", "seq").sort("proc", "seq")
    return found.with_columns(pl.int_range(1, pl.len() + 1).over("proc").alias("_nth"))


def have_parameters(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Which of these calls (proc, seq, args) are of a part of a model, or run a module with parameters of one."""
    modules = set(_frames.owned(trace)["module"].unique().drop_nulls().to_list())
    holders = [code for code, given in enumerate(trace.features) if given.get("0.type") in modules]
    named = [code for code in calls["args"].unique().to_list() if trace.features[code].get("0.path")]
    rows = np.flatnonzero(trace.calls["args"].is_in(holders).to_numpy())
    around = trace.calls[np.union1d(rows, containment.around(trace, rows))]
    told = calls.select("proc", "seq").join(around.select("proc", "seq", _has=True), on=["proc", "seq"], how="left", maintain_order="left")
    return told["_has"].fill_null(value=False) | calls["args"].is_in(named)


def _held(trace: Trace) -> pl.DataFrame:
    """Classes of which an optimizer holds parameters: proc, optimizer, class."""
    return _frames.memo(trace, "classes that optimizers hold", _build_held)


def _build_held(trace: Trace) -> pl.DataFrame:
    known = _frames.owned(trace).filter(pl.col("role") == "parameter").select("var", pl.col("model").str.split("#").list.first().alias("class"))
    seen = trace.states.select("proc", "var", "meta").unique().join(known, on="var", how="inner")
    seen = seen.join(_frames.metas(trace, "optimizer", "holders", "root"), on="meta", how="left")
    seen = seen.with_columns(pl.coalesce("holders", "optimizer").str.split(",").alias("optimizer")).explode("optimizer").drop_nulls("optimizer")
    wrapped = seen.select("proc", "optimizer", pl.col("root").alias("class")).drop_nulls("class")
    return pl.concat([seen.select("proc", "optimizer", "class"), wrapped]).unique(maintain_order=True)
