"""Learning rates that have fallen so far that nothing moves (`relations/progress.py`).

A scheduler that is stepped for each batch where its numbers count epochs takes a rate of 1e-3 to 1e-16 within minutes. The update is then smaller than half of the last digit of each parameter,
and is rounded away: the loop goes on, and nothing is learned. The very end of a decay may be as small for an update or two, and a warm-up may begin there, so it takes several updates in a row
that move nothing of what the optimizer holds, at a rate that has fallen from where it was.

A schedule that is stepped twice as often as it was made for ends at a rate of 0 halfway, and the loop goes on with it. That takes more updates in a row: the last one, or a few before a restart, may have a rate
of 0. A rate that is set to 0 from where it was, which rests an optimizer for a while, has not come down to it.
"""

from __future__ import annotations

import os
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

SCHEDULE: Final = "torch.optim.lr_scheduler.LRScheduler.step"
IN_A_ROW: Final = 3  # updates that move nothing
AT_ZERO: Final = 8  # those at a rate of 0
_FALLEN: Final = 1e-4  # of the largest rate so far
_NEAR_ZERO: Final = 0.25  # of it, from where a rate may come down to 0


def vanished(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """One row an optimizer and update at a known rate: passed unless the rate has fallen and neither it nor the updates before it moved anything. The columns of `progress`.

    `rows`: values of the parameters that optimizers update, in order.
    """
    held = rows.filter(pl.col("in_optimizer") == "true").with_columns((pl.col("fp") != pl.col("fp").shift(1)).over("proc", "var").fill_null(value=False).alias("_changed"))
    mine = ["proc", "optimizer"]
    about = held.group_by(mine, maintain_order=True).agg(pl.col("var", "name", "module", "kind", "position", "wrapper", "_lossy").first(), pl.col("norm").last())
    turns = _frames.updates(trace).filter(pl.col("step") >= 0).select("proc", "step", "seq", "phase", pl.col("site").alias("_site"), "optimizer").sort("proc", "seq")
    turns = turns.join(about, on=mine, how="inner", maintain_order="left")
    moved = held.filter("_changed").select("proc", "optimizer", "step").unique().with_columns(pl.lit(value=True).alias("_moved"))
    turns = turns.join(moved, on=["proc", "optimizer", "step"], how="left", maintain_order="left").with_columns(pl.col("_moved").fill_null(value=False))
    rates = _sightings.options(trace).filter((pl.col("text") == "lr") & (pl.col("seq") > 0)).group_by("proc", "seq").agg(pl.col("number").max().alias("_lr"))
    turns = turns.join(rates, on=["proc", "seq"], how="left", maintain_order="left").with_columns(pl.col("_lr").forward_fill().over(mine)).drop_nulls("_lr")
    turns = turns.with_columns(pl.col("_lr").cum_max().over(mine).alias("_top"), pl.int_range(pl.len()).over(mine).alias("_turn"))
    pushed = _pushed(trace).with_columns(pl.lit(value=True).alias("_pushed"))
    turns = turns.join(pushed, on=["proc", "optimizer", "step"], how="left", maintain_order="left").join(_frames.whole_steps(trace), on=["proc", "step"], how="semi", maintain_order="left")
    turns = turns.with_columns(pl.when(pl.col("_lr") > 0).then("_lr").forward_fill().over(mine).alias("_before"))
    idle = ~pl.col("_moved") & pl.col("_pushed").fill_null(value=False)
    still = idle & (pl.col("_lr") > 0) & (pl.col("_lr") < _FALLEN * pl.col("_top"))
    ended = idle & (pl.col("_lr") == 0) & (pl.col("_before") < _NEAR_ZERO * pl.col("_top"))
    turns = turns.with_columns(still.alias("_still"), ended.fill_null(value=False).alias("_ended"))
    fails = _in_a_row("_still", IN_A_ROW, mine) | _in_a_row("_ended", AT_ZERO, mine)
    turns = turns.with_columns((~fails).alias("passed")).filter(~pl.col("passed") | pl.col("_moved"))
    turns = turns.with_columns(_said(trace, turns)).join(trace.families, on="proc", how="left", maintain_order="left")
    return turns.rename({"_site": "site"}).with_columns(
        pl.when(pl.col("passed") | ~pl.col("_lossy")).then("passed").alias("passed"), pl.col("norm").alias("_a"), pl.col("norm").alias("_b")
    )


def _in_a_row(column: str, count: int, mine: list[str]) -> pl.Expr:
    """Whether this holds of an update and of those right before it."""
    return pl.all_horizontal((pl.col(column).shift(i) & (pl.col("_turn").shift(i) == pl.col("_turn") - i)).over(mine).fill_null(value=False) for i in range(count))


def _pushed(trace: Trace) -> pl.DataFrame:
    """Steps in which something that an optimizer holds has a gradient that is not zero: proc, optimizer, step."""
    grads = _frames.used_gradients(trace).filter(~_frames.has(int(StateFlag.ZERO | StateFlag.NONE | StateFlag.NONFINITE)))
    grads = grads.join(_frames.metas(trace, "optimizer"), on="meta", how="left", maintain_order="left")
    return grads.drop_nulls("optimizer").select("proc", "optimizer", "step").unique()


def _said(trace: Trace, turns: pl.DataFrame) -> pl.Series:
    """Of failing rows: the rate, from where it fell, and which scheduler stepped last and how often."""
    steps = _frames.calls_of(trace, SCHEDULE.replace(".", r"\.")).sort("proc", "seq")
    steps = steps.join(_frames.arguments(trace, steps["args"], _class="0.type"), on="args", how="left", maintain_order="left")
    steps = steps.select("proc", "seq", pl.col("_class").str.split(".").list.last(), "site", pl.int_range(1, pl.len() + 1).over("proc").alias("_times"))
    bad = turns.with_row_index("_row").filter(~pl.col("passed")).select("_row", "proc", "seq", "_lr", "_top", "_turn").sort("seq")
    bad = bad.join_asof(steps.sort("seq"), on="seq", by="proc", strategy="backward", check_sortedness=False)
    texts = dict[int, str]()
    for row in bad.to_dicts():
        where = os.path.basename(trace.sites[row["site"]]) if row["site"] else ""
        by = f"; {row['_class'] or 'a scheduler'} has stepped {row['_times']} times in {row['_turn'] + 1} updates{f', last at {where}' if where else ''}" if row["_times"] else ""
        size = f"too small: {row['_lr']:.2g}" if row["_lr"] else "0"
        texts[row["_row"]] = f"{IN_A_ROW if row['_lr'] else AT_ZERO} updates, since its learning rate is {size}, down from {row['_top']:.2g}{by}"
    return pl.Series("_norms", [texts.get(i, "") for i in range(turns.height)], dtype=pl.String)
