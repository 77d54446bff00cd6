"""Was every gradient cleared between two updates? Read off the gradients, by whatever means that happened."""

from __future__ import annotations

import polars as pl

from proctor.invariants.relations.sequence.windows import BACKWARD, STEP, named
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import cached, calls_of, features_of, lossless, texts
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace


def clearings(trace: Trace) -> pl.DataFrame:
    """Updates but the first of each optimizer: proc, step, seq, site, passed, _variable, _seen.

    passed: each gradient that the last update used was None or zero at some moment since. It speaks of gradients that
    a backward pass wrote since (one that the optimizer copies into its masters is replaced), and that are not zero.
    A `zero_` that no boundary saw (`p.grad.data.zero_()` moves no version counter) makes a failure undecided.
    """
    return cached(trace, "clearings", lambda: _build_clearings(trace))


def _build_clearings(trace: Trace) -> pl.DataFrame:
    updates = (
        calls_of(trace)
        .join(texts(trace.functions, "fn", "function").filter(pl.col("function") == STEP), on="fn")
        .join(
            features_of(trace)
            .filter(pl.col("name") == "0.name")
            .select(pl.col("code").alias("args"), pl.col("value").alias("optimizer")),
            on="args",
        )
        .select("proc", "optimizer", "seq", "step", "site")
        .sort("proc", "optimizer", "seq")
        .with_columns(pl.int_range(pl.len()).over("proc", "optimizer").alias("k"))
    )
    empty = pl.DataFrame(
        schema={
            "proc": pl.UInt16,
            "step": pl.Int32,
            "seq": pl.UInt32,
            "site": pl.UInt32,
            "passed": pl.Boolean,
            "_variable": pl.String,
            "_seen": pl.String,
        }
    )
    if "optimizer" not in trace.metas.columns:
        return empty
    grads = trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")).select("var", "name")
    gone = int(StateFlag.NONE | StateFlag.ZERO)
    backward = named(trace, BACKWARD, "torch.autograd.backward").select(
        "proc", pl.col("seq").alias("call"), wrote=pl.lit(value=True)
    )
    rows = (
        trace.states.with_row_index("row")
        .join(grads, on="var")
        .join(trace.metas.select("meta", "optimizer"), on="meta")
        .join(backward, on=["proc", "call"], how="left")
        .select(
            "row",
            "proc",
            "var",
            "name",
            "optimizer",
            _moment(pl.col("edge")),
            (pl.col("flags") & gone != 0).alias("clear"),
            (pl.col("wrote").fill_null(value=False) & (pl.col("edge") == 1)).alias("wrote"),
        )
    )
    if rows.is_empty():
        return empty
    zeroed = named(trace, "torch.Tensor.zero_", "torch.Tensor.fill_").with_columns(_moment(pl.lit(1)))
    # With a closure an update uses the gradients that were computed inside of it.
    inner = _frames.inner_backwards(trace).group_by("proc", pl.col("update").alias("seq")).agg((2 * pl.col("call").max().cast(pl.Int64) + 1).alias("_inner"))
    updates = updates.with_columns(_moment(pl.lit(0))).join(inner, on=["proc", "seq"], how="left", maintain_order="left")
    return _between(trace, updates.with_columns(pl.coalesce("_inner", "moment").alias("moment")), rows, zeroed)


def _moment(edge: pl.Expr) -> pl.Expr:
    """Orders what was seen after a call behind what was seen before it."""
    return (2 * pl.col("seq").cast(pl.Int64) + (edge == 1).cast(pl.Int64)).alias("moment")


def _between(trace: Trace, updates: pl.DataFrame, rows: pl.DataFrame, zeroed: pl.DataFrame) -> pl.DataFrame:
    """Whether each variable had a clear row in each interval between updates of its optimizer."""
    # A row that the update itself noticed before it ran is the gradient that this update uses.
    ends = updates.select("proc", "optimizer", "moment", pl.col("k").alias("interval")).sort("moment")
    placed = (
        rows.sort("moment")
        .join_asof(ends, on="moment", by=["proc", "optimizer"], strategy="forward", check_sortedness=False)
        .drop_nulls("interval")
        .sort("row")
    )
    per = (
        placed.group_by("proc", "optimizer", "var", "interval")
        .agg(pl.col("clear", "wrote").any(), pl.col("clear").last().alias("now"), pl.col("name").first())
        .sort("proc", "optimizer", "var", "interval")
    )
    # Intervals without a row do not matter: the gradient stayed what it was at the update before.
    per = per.with_columns(pl.col("now").shift(1).over("proc", "optimizer", "var").alias("before"))
    used = per.filter(
        (pl.col("interval") > 0) & pl.col("wrote") & ~pl.col("now") & ~pl.col("before").fill_null(value=True)
    )
    found = (
        used.sort("name")
        .group_by("proc", "optimizer", pl.col("interval").alias("k"))
        .agg(
            pl.col("clear").all().alias("passed"),
            pl.col("name").filter(~pl.col("clear")).first().alias("_variable"),
            (~pl.col("clear")).sum().alias("bad"),
            pl.len().alias("all"),
        )
    )
    hidden = (
        zeroed.sort("moment")
        .join_asof(ends, on="moment", by="proc", strategy="forward", check_sortedness=False)
        .select("proc", pl.col("interval").alias("k"), hidden=pl.lit(value=True))
        .unique()
    )
    whole = lossless(trace).with_columns(whole=pl.lit(value=True))
    # Between updates with steps that were not recorded, nobody knows what was cleared.
    steps = calls_of(trace).select("proc", "step").unique().sort("step")
    steps = steps.with_columns((pl.col("step") - pl.int_range(pl.len()).over("proc")).alias("missing"))
    updates = (
        updates.join(steps, on=["proc", "step"])
        .sort("proc", "optimizer", "k")
        .with_columns(
            (pl.col("missing") == pl.col("missing").shift(1).over("proc", "optimizer"))
            .fill_null(value=True)
            .alias("next")
        )
    )
    decided = pl.col("passed") | (pl.col("whole") & pl.col("next") & pl.col("hidden").is_null())
    return (
        updates.join(found, on=["proc", "optimizer", "k"])
        .join(whole, on="proc", how="left")
        .join(hidden, on=["proc", "k"], how="left")
        .with_columns(
            pl.when(decided).then("passed").alias("passed"),
            pl.format("{} of {} gradients not cleared since the update before", "bad", "all").alias("_seen"),
        )
        .select("proc", "step", "seq", "site", "passed", "_variable", "_seen")
        .sort("proc", "seq")
    )
