"""Averages that are taken of a model and of itself (`relations/course`).

`average = model` makes no copy: from then on each average of the two writes into the model what it has, but for rounding, and whoever evaluates the average evaluates the model.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.course.updating import examples, fine
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import calls_of, circumstances_of, codes_where
from proctor.invariants.trace import Trace

_ULP: Final = 1.3e-7  # of a norm in float32: what rounding of its numbers may do to it
_STEPS: Final = 3  # in a row; live windows hold the first three and the one before
_LEAST: Final = 16  # numbers of a parameter
_MOVES: Final = 1e-5  # share of its norm by which an update has to move a parameter, or nothing tells a normalisation from rounding


def averaged(trace: Trace) -> pl.DataFrame:
    """One row an update, and the third step in a row in which a program writes two parameters of float32 or more between updates, changes none by more than rounding, and half of them by no norm at all.

    Said of steps in which no model runs without gradients: evolution strategies move parameters there and back. What is normalised each step has a norm that stays, and what decays by hand moves each norm
    by a little in one direction.
    """
    written = _written(trace)
    if not written.height:
        return fine(trace, "averaged", _frames.UPDATE)
    mine = ["proc", "step"]
    steps = written.group_by(mine, maintain_order=True).agg(
        pl.len().alias("_n"), (pl.col("_moved") <= _ULP).all().alias("_small"), ((pl.col("_moved") == 0).mean() >= 0.5).alias("_still"), (pl.col("_went") > _MOVES).mean().alias("_trains"),
        pl.col("seq").last(), pl.col("name").first().alias("_variable"),
    ).sort(mine)  # fmt: skip
    there = steps.join(_without_gradients(trace), on=mine, how="left", maintain_order="left")
    good = (pl.col("_n") > 1) & pl.col("_small") & pl.col("_still") & (pl.col("_trains") >= 0.5) & pl.col("_free").is_null()
    there = there.with_columns(good.alias("_good"), (~good | (pl.col("step") != pl.col("step").shift(1).over("proc") + 1).fill_null(value=True)).cum_sum().over("proc").alias("_run"))
    there = there.with_columns(pl.col("_good").cast(pl.Int64).cum_sum().over("proc", "_run").alias("_nth"))
    bad = there.filter(pl.col("_good") & (pl.col("_nth") == _STEPS))
    seen = pl.format("{} parameters, such as {}, were written between updates in three steps in a row, and changed by rounding alone", "_n", "_variable")
    bad = bad.select("proc", "step", "seq", pl.lit(0, dtype=pl.UInt32).alias("site"), seen.alias("_seen"), "_variable")
    return examples(trace, "averaged", bad, function=_frames.UPDATE)


def _written(trace: Trace) -> pl.DataFrame:
    """Parameters of an optimizer that were written outside of updates: proc, step, seq, name, _moved (share of the norm), _went (the same, since it was written before)."""
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data")).select("var", "name")
    late = (pl.col("edge") == 0) & pl.col("fresh") & (pl.col("step") >= 0)
    seldom = _frames.rows(trace).filter(late).join(about, on="var", how="semi")
    if not seldom.height:
        return seldom
    rows = _frames.rows(trace).join(about, on="var", how="inner", maintain_order="left").join(seldom.select("proc", "var").unique(), on=["proc", "var"], how="semi", maintain_order="left")
    rows = rows.with_columns(pl.col("norm").cast(pl.Float64).alias("norm"), pl.col("norm").cast(pl.Float64).shift(1).over("proc", "var").alias("_before")).filter(late)
    rows = rows.join(_frames.metas(trace, "optimizer", "requires_grad", "dtype", "shape"), on="meta", how="left", maintain_order="left")
    numbers = pl.col("shape").str.extract_all(r"\d+").list.eval(pl.element().cast(pl.Int64).product()).list.first()
    wide = pl.col("dtype").is_in(["float32", "float64"]) & (numbers >= _LEAST)
    rows = rows.filter((pl.col("requires_grad") == "true") & pl.col("optimizer").is_not_null() & wide)
    share = (pl.col("norm") - pl.col("_before")).abs() / pl.max_horizontal("norm", "_before")
    went = (pl.col("norm") - pl.col("norm").shift(1).over("proc", "var")).abs() / pl.col("norm")
    return rows.with_columns(share.fill_nan(0.0).alias("_moved"), went.fill_nan(0.0).fill_null(1.0).alias("_went"))


def _without_gradients(trace: Trace) -> pl.DataFrame:
    """Steps in which a module is called without gradients: proc, step, _free."""
    forwards = codes_where(trace, lambda n: n.endswith(".forward"))
    free = circumstances_of(trace).filter(pl.col("grad") == "false")["circ"]
    calls = calls_of(trace).filter(pl.col("fn").is_in(forwards) & pl.col("circ").is_in(free.implode()))
    return calls.select("proc", "step").unique().with_columns(_free=True)
