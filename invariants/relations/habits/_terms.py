"""What a backward is given against the numbers beside it: the last loss, and the terms that have a name (`relations/varies.py`).

`whole`: it is the loss that torch's function gave, undivided and alone, and `each` is where a step has several backwards. `shared`: it is that
loss, divided by the number of backwards of its step, as where microbatches are accumulated. `more`: it is no fixed multiple of this number, so that another
term is in it. Which of them holds is seen at the first looks.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.trace import Trace

LOSS: Final = "loss()"
LOOKS: Final = 8
BETWEEN: Final = " beside "
_EQUAL: Final = 1e-6  # relative; numbers are float32 at least
_CONSTANT: Final = 3  # steps
_CLEARLY: Final = 1e-3  # relative, by which a multiple varies where a rule is made


def pairs(looks: pl.DataFrame) -> pl.DataFrame:
    """Each backward's number with those of the same call and function: proc, step, seq, what, name, given, number; the first looks at each.

    Args:
        looks: numbers of the program: proc, step, seq, text, number.
    """
    rows = looks.drop_nulls("text").with_columns(
        pl.col("text").str.extract(r"^(.*):", 1).alias("_function"), pl.col("text").str.extract(r":([^:]*)$", 1).alias("name")
    )
    given = rows.filter(pl.col("name").str.contains(r"^backward\[\d+\]$")).select("proc", "step", "seq", "_function", pl.col("text").alias("_given"), pl.col("number").alias("given"))
    rows = given.join(rows.filter(~pl.col("name").str.starts_with("backward[")).select("proc", "seq", "_function", "name", "number"), on=["proc", "seq", "_function"])
    rows = rows.with_columns(pl.concat_str("_given", pl.lit(BETWEEN), "name").alias("what")).unique(["proc", "seq", "what"], keep="first", maintain_order=True)
    rows = rows.sort("proc", "what", "seq", maintain_order=True)
    return rows.filter(pl.int_range(pl.len()).over("proc", "what") < LOOKS).select("proc", "step", "seq", "what", "name", "given", "number")


def whole(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """One row a backward and mode: passed if it is given the last loss, or its share of that.

    Of steps with another number of backwards than the first (the rest of an epoch) nothing is said: what they divide by is not known.
    """
    calls = _frames.calls_of(trace, r"torch\.Tensor\.backward").group_by("proc", "step").agg(pl.len().alias("_n"))
    first = calls.filter(pl.col("step") >= -1).sort("step").group_by("proc").agg(pl.col("_n").first().alias("_usual"))
    rows = rows.filter(pl.col("name") == LOSS).join(calls, on=["proc", "step"]).join(first, on="proc").filter(pl.col("_n") == pl.col("_usual"))
    rows = rows.sort("proc", "what", "seq")
    parts = []
    for mode, times, of in (("whole", pl.lit(1), pl.col("_n") == 1), ("each", pl.lit(1), pl.col("_n") > 1), ("shared", pl.col("_n"), pl.col("_n") > 1)):
        same = (pl.col("given") * times - pl.col("number")).abs() <= _EQUAL * pl.col("number").abs()
        seen = pl.format("{} where the loss function gave {}, and {} backward(s) in the step", pl.col("given").round_sig_figs(6), pl.col("number").round_sig_figs(6), "_n")
        parts.append(_finish(trace, rows.filter(of).with_columns(same.alias("passed"), pl.lit(value=True).alias("_varied")), mode, seen))
    return pl.concat(parts)


def more(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """One row a number and look at which it has changed: passed if what is propagated was not the same multiple of it all the time.

    Parts of one batch are divided by one number, such as its tokens, and two batches may have as many: it takes three steps to fail.
    """
    mine, number = ["proc", "what"], pl.col("number")
    rows = rows.filter(number != 0).with_columns((pl.col("given") / number).alias("_ratio"), number.diff().over(mine).alias("_rise"), pl.col("step").rank("dense").over(mine).alias("_nth"))
    rise, ratio = pl.col("_rise"), pl.col("_ratio")
    rows = rows.with_columns(
        (ratio.cum_max() - ratio.cum_min()).over(mine).alias("_spread"), (number.cum_max() - number.cum_min()).over(mine).alias("_range"),
        (((rise > 0).any() & (rise < 0).any()).over(mine) & (number.n_unique() == LOOKS).over(mine) & (number != number.round()).any().over(mine)).alias("_lively"),
    )
    size = ratio.abs().max().over(mine)
    rows = rows.filter(pl.col("_range") > _CLEARLY * number.abs()).with_columns(
        (pl.col("_spread") > _EQUAL * size).alias("passed"), (pl.col("_lively") & (pl.col("_spread").max().over(mine) > _CLEARLY * size)).alias("_varied")
    )
    rows = rows.filter(pl.col("passed") | (pl.col("_nth") >= _CONSTANT))
    return _finish(trace, rows, "more", pl.format("{} times this number, from the first look on", pl.col("_ratio").round_sig_figs(6)))


def _finish(trace: Trace, rows: pl.DataFrame, mode: str, seen: pl.Expr) -> pl.DataFrame:
    """In the form of `_sightings.EXAMPLE`, with `_varied`: whether it says something for a rule."""
    rows = _habits.with_family(trace, _sightings.sites(trace, rows.with_columns(seen.alias("_seen"))))
    return _sightings.example(rows, mode=mode).with_columns(rows["_varied"])


def lossy(trace: Trace, found: pl.DataFrame) -> pl.DataFrame:
    """Failing examples of processes whose first looks may not all be there are undecided."""
    steps = _frames.seen_steps(trace).filter(pl.col("step") >= 0).group_by("proc").agg((pl.len() <= pl.col("step").max()).alias("_gap"))
    lost = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    found = found.join(steps, on="proc", how="left", maintain_order="left")
    return found.with_columns(pl.when(pl.col("passed") | ~(lost | pl.col("_gap").fill_null(value=False))).then("passed").alias("passed")).drop("_gap")
