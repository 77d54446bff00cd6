"""Updates that are taken back: each time an optimizer steps, its parameters have the value from before its last step (`relations/progress.py`).

Or, for the third time, the value from before its first step: all that it has learned is gone.

It comes of a copy in the wrong direction (an average loaded into the model that it averages), of an average that nobody updates and that is put in the model's place, of a backup that is restored in
each iteration, and of a step on tensors that a wrapper writes over. A single update that is taken back is a choice (an unrolled step, a line search, a search for a
learning rate), so only several in a row fail. All parameters that the optimizer moved have to be back, to the last bit; where it moved none, nothing was taken back.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.trace import Trace

_IN_A_ROW: Final = 3
_AT_THE_START: Final = 3  # times that all is as it was before the first update


def undone(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """One row an optimizer and update that moved something: passed unless it and those before it were taken back. The columns of `progress`.

    `rows`: values of the parameters that optimizers update, in order, with `inside` where an update left them. Of the last update nothing is
    said: what comes after it may be meant for something else.
    """
    mine = ["proc", "var"]
    rows = rows.with_columns(pl.col("inside").cum_sum().over(mine).alias("_turn"))
    turns = rows.filter((pl.col("in_optimizer") == "true").all().over(mine)).group_by(*mine, "_turn", maintain_order=True).agg(
        pl.col("fp").last(),
        pl.col("step", "seq", "phase", "name", "module", "kind", "position", "optimizer", "_lossy", "_site", "call").first(),
        pl.col("wrapper", "norm").last(),
        pl.col("norm").first().alias("_left"),
        (pl.col("fp").first() != pl.col("fp").last()).alias("_parted"),
        pl.col("call").last().alias("_by_call"),
    )  # fmt: skip
    turns = turns.with_columns(
        (pl.col("fp") == pl.col("fp").shift(1).over(mine)).alias("_back"), (pl.col("fp") == pl.col("fp").first().over(mine)).alias("_home"), (pl.col("_turn") == pl.col("_turn").max().over(mine)).alias("_last"),
    )
    # A learner that starts anew for each task has another optimizer, whose updates stay; whether it has, is known at the end.
    alone = (pl.col("optimizer").drop_nulls().n_unique().over(mine) == 1) & trace.ends
    turns = turns.with_columns(pl.col("_home") & alone)
    turns = turns.filter((pl.col("_turn") > 0) & (pl.col("step") >= 0) & ~pl.col("_last")).drop_nulls("_back")
    update = ["proc", "optimizer", "call"]
    found = turns.group_by(update, maintain_order=True).agg(
        pl.col("_back", "_home").all() & pl.col("_parted").any(), pl.col("step", "seq", "phase", "name", "module", "kind", "position", "wrapper", "_lossy", "_site", "_by_call", "var").first(),
        pl.col("_left").first().alias("_a"), pl.col("norm").first().alias("_b"),
    ).sort("proc", "optimizer", "seq", maintain_order=True)  # fmt: skip
    row_of = pl.all_horizontal(pl.col("_back").shift(i).over("proc", "optimizer") for i in range(_IN_A_ROW))
    again = pl.col("_home") & (pl.col("_home").cum_sum().over("proc", "optimizer") >= _AT_THE_START)
    found = found.with_columns((~(row_of.fill_null(value=False) | again)).alias("passed"))
    size = pl.format("(norm {} before, {} after)", pl.col("_a").round(6), pl.col("_b").round(6))
    last = pl.format("has the value from before this update again, and so it was with the two updates before {}", size)
    first = pl.format("has the value from before the first update again, for the third time {}", size)
    found = found.with_columns(pl.when(row_of.fill_null(value=False)).then(last).otherwise(first).alias("_norms"))
    names = pl.DataFrame({"fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32), "_by": trace.functions})
    calls = trace.calls.select("proc", pl.col("seq").alias("_by_call"), "fn").unique(["proc", "_by_call"]).join(names, on="fn").drop("fn")
    found = found.join(calls, on=["proc", "_by_call"], how="left", maintain_order="left").join(trace.families, on="proc", how="left", maintain_order="left")
    return found.rename({"_site": "site"}).with_columns(pl.when(pl.col("passed") | ~pl.col("_lossy")).then("passed").alias("passed"))
