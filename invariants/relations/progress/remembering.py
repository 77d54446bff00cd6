"""What optimizers remember: a running average of gradients is no fixed multiple of the last one (`relations/progress.py`).

After the first update an average is a fixed share of the gradient, as in Adam (1 - beta1). If it has the same share of each later gradient, all of
its past was thrown away, unless the gradient has grown so much that the past is rounded away. Of what is the gradient itself (a share of 1: beta1 = 0, the last gradient kept) nothing is said.
And what gradients remember: a backward that doubles all of them to the last bit has propagated the same loss once more, or the same batch.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import CallFlag
from proctor.invariants.trace import Trace

_DOUBLE: Final = 1e-6  # of norms of float32; a double is exact in each element
_EQUAL: Final = 1e-5  # relative: norms are float32
_CLEARLY: Final = 1e-3  # relative, by which the size of the gradient has changed where a share tells something


def remembered(trace: Trace) -> pl.DataFrame:
    """One row a kind of state and later update: passed unless it has the share of the first update everywhere. The columns of `progress`."""
    return _frames.memo(trace, "what optimizers remember", _remembered)


def _remembered(trace: Trace) -> pl.DataFrame:
    kinds = trace.variables.filter((pl.col("role") == "optimizer") & (pl.col("alias") == "")).select("var", "name", pl.col("attr").alias("kind"))
    states = _frames.rows(trace).filter((pl.col("step") >= 0) & pl.col("norm").is_finite()).join(kinds, on="var", how="inner", maintain_order="left")
    states = states.unique(["proc", "var", "step"], keep="last", maintain_order=True).select("proc", "name", "kind", "step", pl.col("norm").cast(pl.Float64).alias("_state"))
    names = trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")).select("var", "name", "module", "position")
    grads = _frames.used_gradients(trace).join(names, on="var", how="inner", maintain_order="left").filter(pl.col("norm") > 0).drop_nulls("update")
    grads = grads.select("proc", "name", "step", "module", "position", pl.col("update").alias("seq"), "site", "meta", pl.col("norm").cast(pl.Float64))
    # Two models may have parameters of one name, and a state says the name only.
    alone = _frames.used_gradients(trace).select("proc", "var").unique().join(names, on="var").group_by("proc", "name").len("_vars").filter(pl.col("_vars") == 1)
    grads = grads.join(alone, on=["proc", "name"], how="semi", maintain_order="left")
    rows = states.join(grads, on=["proc", "name", "step"], how="inner", maintain_order="left").sort("step", maintain_order=True)
    mine = ["proc", "name", "kind"]
    rows = rows.filter(pl.len().over(*mine, "step") == 1).with_columns((pl.col("_state") / pl.col("norm")).alias("_share"))
    first, size = pl.col("_share").first().over(mine), pl.col("norm").first().over(mine)
    rows = rows.with_columns(
        ((pl.col("_share") / first - 1).abs() < _EQUAL).alias("_same"), ((pl.col("norm") / size - 1).abs() > _CLEARLY).alias("_tells"),
        ((first - 1).abs() > _CLEARLY).alias("_part"), (pl.int_range(pl.len()).over(mine) > 0).alias("_later"),
        (pl.col("_state").shift(1).over(mine) > _CLEARLY * pl.col("_state")).fill_null(value=False).alias("_shows"),  # else the past is rounded away
    )
    rows = rows.filter(pl.col("_later") & pl.col("_part") & pl.col("_tells") & pl.col("_shows") & (pl.col("_share") > 0) & ~_begins_anew(trace, rows))
    rows = rows.join(_frames.metas(trace, "wrapper"), on="meta", how="left", maintain_order="left")
    found = rows.group_by("proc", "kind", "step", maintain_order=True).agg(
        (~pl.col("_same").all()).alias("passed"), pl.col("name", "module", "position", "wrapper", "seq", "site", "norm").first(), pl.col("_state").first().alias("_b")
    )
    phases = trace.contexts.filter(pl.col("step") >= 0).group_by("step").agg(pl.col("phase").first())
    found = found.join(phases, on="step", how="left", maintain_order="left").join(trace.families, on="proc", how="left", maintain_order="left")
    return found.with_columns(pl.col("norm").alias("_a"), pl.concat_str("name", pl.lit("."), "kind").alias("name"), pl.concat_str("kind", "name").hash(0).alias("var"))


def _begins_anew(trace: Trace, rows: pl.DataFrame) -> pl.Series:
    """Rows of the first update of an optimizer that was made after one with several: a new phase of training has no past to remember."""
    mine = ["proc", "name", "kind"]
    told = _sightings.with_session(trace, rows.with_row_index("_at"))
    each = told.group_by(*mine, "session").agg(pl.len().alias("_updates"), pl.col("step").min()).sort("session")
    each = each.with_columns(pl.col("_updates").shift(1).over(mine).alias("_before"))
    told = told.join(each.select(*mine, "session", "_before", pl.col("step").alias("_first")), on=[*mine, "session"], how="left", maintain_order="left").sort("_at")
    return told.select(((pl.col("step") == pl.col("_first")) & (pl.col("_before") > 1)).fill_null(value=False).alias("anew"))["anew"]


def counted(trace: Trace) -> pl.DataFrame:
    """One row a backward that writes gradients: passed unless it exactly doubles what the one before it left, in all of them.

    `fed`: a model ran forward since the backward before it. Without that, what doubles is one loss that was propagated twice.
    """
    return _frames.memo(trace, "what backwards add", _counted)


def _with_forwards(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    """Add `fed`. Where no call of a model was seen, whoever computes the loss computes it unseen."""
    models = trace.calls.filter(_frames.has(int(CallFlag.ROOT))).select("proc", "seq", pl.col("seq").alias("_forward")).sort("seq")
    found = found.sort("call").join_asof(models, left_on="call", right_on="seq", by="proc", strategy="backward", check_sortedness=False, coalesce=False).sort("proc", "call")
    known = pl.col("proc").is_in(models["proc"].unique().implode())
    return found.with_columns((~known | (pl.col("_forward") > pl.col("_last"))).fill_null(value=True).alias("fed"))


def _counted(trace: Trace) -> pl.DataFrame:
    names = trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")).select("var", "name", "module", "kind", "position")
    calls = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", pl.col("seq").alias("call"), "site", pl.lit(value=True).alias("_wrote"))
    rows = _frames.rows(trace).join(names, on="var", how="inner", maintain_order="left").join(calls, on=["proc", "call"], how="left", maintain_order="left")
    wrote = pl.col("_wrote").fill_null(value=False) & (pl.col("edge") == 1) & (pl.col("norm") > 0)
    rows = rows.with_columns(wrote.alias("_wrote"))
    previous = pl.Series(_frames.previous_of(rows))  # of many ranks there are a million rows, and a query over groups for each column takes a second
    last = rows[["_wrote", "call", "step", "norm"]][previous.clip(lower_bound=0)].with_columns(pl.when(previous >= 0).then(pl.all()))
    rows = rows.hstack(last.select(pl.all().name.prefix("_last_"))).with_columns(
        (pl.col("_last__wrote") & (pl.col("call") != pl.col("_last_call")) & (pl.col("step") <= pl.col("_last_step") + 1)).fill_null(value=False).alias("_again"),
        (pl.col("norm").cast(pl.Float64) / pl.col("_last_norm").cast(pl.Float64)).alias("_times"), pl.col("_last_norm").alias("_a"), pl.col("_last_call").alias("_last"),
    )
    rows = rows.filter(pl.col("_wrote") & (pl.col("step") >= -1)).join(_frames.metas(trace, "wrapper"), on="meta", how="left", maintain_order="left")
    doubled = pl.col("_again") & ((pl.col("_times") - 2).abs() < _DOUBLE)
    found = rows.group_by("proc", "call", maintain_order=True).agg(
        (~doubled.all()).alias("passed"), pl.col("step", "phase", "name", "module", "kind", "position", "wrapper", "site", "var", "_a").first(), pl.col("norm").first().alias("_b"), pl.col("_last").max()
    )
    return _with_forwards(trace, found).with_columns(pl.col("call").alias("seq")).join(trace.families, on="proc", how="left", maintain_order="left")
