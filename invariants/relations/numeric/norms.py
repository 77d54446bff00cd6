"""Norms over a run against the run's own past, and the sequential test on them.

Every statistic is a ratio to earlier steps of the same run, so that what is learned transfers over sizes, learning rates
and kinds of models. The test is an e-process (Ramdas et al., "Game-theoretic statistics and safe anytime-valid
inference", 2023, §4): under the null the wealth of a bettor on exceedances is a supermartingale, so that by Ville's
inequality the probability that it ever reaches 1/α is at most α, whenever one looks and however long the run is.
"""

from __future__ import annotations

import math
from typing import Final

import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace

_REMEMBERED: Final = 4096  # updates of a run that goes on, over all processes,
_LEAST_REMEMBERED: Final = 32  # and of each
WARM_UP: Final = 5  # updates before a run has a past to be compared with
_BAD: Final = int(StateFlag.NONE | StateFlag.NONFINITE | StateFlag.UNHASHED)


def gradients(trace: Trace) -> pl.DataFrame:
    """Gradients of the parameters of each optimizer at its updates, all in one.

    Columns: proc, optimizer, step, seq, site, lossy, norm (of all), count, zero (all of them), broken (one is not finite).
    """
    return _frames.memo(trace, "optimizer gradients", lambda t: _with_past(t, "gradients", _gradients(t)))


def _gradients(trace: Trace) -> pl.DataFrame:
    used = _frames.used_gradients(trace).join(_frames.metas(trace, "optimizer"), on="meta", how="left", maintain_order="left")
    used = used.filter(pl.col("optimizer").is_not_null() & pl.col("update").is_not_null() & (pl.col("step") >= 0))
    flagged = _frames.has(int(StateFlag.NONFINITE))
    total = used.group_by("proc", "optimizer", "step", maintain_order=True).agg(
        pl.col("update").last().alias("seq"),
        pl.col("site").last(),
        pl.col("norm").filter(~_frames.has(_BAD)).cast(pl.Float64).pow(2).sum().sqrt().alias("norm"),
        pl.len().alias("count"),
        _frames.has(int(StateFlag.ZERO)).all().alias("zero"),
        flagged.any().alias("broken"),
        pl.col("var").filter(flagged).first().alias("var"),
    )
    return total.with_columns(_lossy(trace))


def weights(trace: Trace) -> pl.DataFrame:
    """Norm of all parameters of each optimizer after each step: proc, optimizer, step, seq, site, lossy, norm, more (some are seen for the first time)."""
    return _frames.memo(trace, "optimizer weights", lambda t: _with_past(t, "weights", _weights(t)))


def _weights(trace: Trace) -> pl.DataFrame:
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data")).select("var")
    data = _frames.data_by_step(trace).join(about, on="var", how="semi").join(_frames.metas(trace, "optimizer"), on="meta", how="left")
    data = data.filter(pl.col("optimizer").is_not_null() & ~_frames.has(_BAD)).sort("step", "seq")
    # A sum over parameters that change in different steps: the sum of the changes.
    square = pl.col("norm").cast(pl.Float64).pow(2)
    before = square.shift(1).over("proc", "var")
    data = data.with_columns((square - before.fill_null(0.0)).alias("_change"), before.is_null().alias("more"))
    total = data.group_by("proc", "optimizer", "step", maintain_order=True).agg(pl.col("_change").sum(), pl.col("seq").last(), pl.col("more").any())
    total = total.sort("proc", "optimizer", "step").with_columns(
        pl.col("_change").cum_sum().over("proc", "optimizer").clip(lower_bound=0.0).sqrt().alias("norm"), pl.lit(0, dtype=pl.UInt32).alias("site")
    )
    return total.filter(pl.col("step") >= 0).drop("_change").with_columns(_lossy(trace))


def remembered(trace: Trace, first: int, end: int) -> pl.DataFrame:
    """Norms of steps up to `end` (not included), for windows in which they are not held any more: of each optimizer the
    first ones, the largest finite one, and the last ones."""
    told = pl.concat([gradients(trace).with_columns(kind=pl.lit("gradients")), weights(trace).with_columns(kind=pl.lit("weights"))], how="diagonal")
    mine = ["kind", "proc", "optimizer"]
    told = told.filter(pl.col("step") < end).sort(*mine, "step")
    place, last = pl.int_range(pl.len()).over(mine), pl.len().cast(pl.Int64).over(mine)  # a length has no sign: less `kept` it would wrap around
    finite = pl.col("norm").is_finite()
    largest = (finite & (pl.col("norm") == pl.col("norm").filter(finite).max().over(mine))).fill_null(value=False)
    largest &= largest.cum_sum().over(mine) == 1  # of equal ones the first: all may be equal
    kept = max(_LEAST_REMEMBERED, _REMEMBERED // max(1, len(trace.processes)))
    return told.filter((place < WARM_UP) | (place >= last - kept) | largest)


def _with_past(trace: Trace, kind: str, rows: pl.DataFrame) -> pl.DataFrame:
    past = trace.past.get("numeric")
    if past is None:
        return rows
    earlier = past.filter(pl.col("kind") == kind).select(rows.columns)
    both = pl.concat([earlier, rows]).unique(["proc", "optimizer", "step"], keep="first")
    return both.sort("proc", "optimizer", "step")


def _lossy(trace: Trace) -> pl.Expr:
    return pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0]).alias("lossy")


def rises(norms: pl.DataFrame) -> pl.DataFrame:
    """These rows from the sixth update on, with `rise`: log10 of the norm over the largest one of earlier steps."""
    mine = ["proc", "optimizer"]
    rows = norms.filter(pl.col("norm").is_finite() & (pl.col("norm") > 0)).sort(*mine, "step")
    past = pl.col("norm").cum_max().shift(1).over(mine)
    rows = rows.with_columns((pl.col("norm") / past).log10().alias("rise"), past.alias("past"), pl.int_range(pl.len()).over(mine).alias("_i"))
    return rows.filter((pl.col("_i") >= WARM_UP) & pl.col("rise").is_finite()).drop("_i")


def against_median(norms: pl.DataFrame) -> pl.DataFrame:
    """As `rises`, with `rise` against the median of the first updates and of all earlier ones, whichever is larger."""
    mine = ["proc", "optimizer"]
    rows = norms.filter(pl.col("norm").is_finite() & (pl.col("norm") > 0)).sort(*mine, "step")
    longest = max([1, *rows.group_by(mine).len()["len"].to_list()])
    past = pl.col("norm").rolling_median(window_size=longest, min_samples=1).shift(1).over(mine)
    start = pl.col("norm").head(WARM_UP).median().over(mine)
    rows = rows.with_columns(pl.max_horizontal(past, start).alias("past"), pl.int_range(pl.len()).over(mine).alias("_i"))
    rows = rows.with_columns((pl.col("norm") / pl.col("past")).log10().alias("rise"))
    return rows.filter(pl.col("_i") >= WARM_UP).select(*norms.columns, "rise", "past")


def log_wealth(by: list[str], rate: float) -> pl.Expr:
    """Natural log of the bettor's wealth after each row of a frame with the boolean column `exceeds`.

    Args:
        by: columns that tell the sequences apart.
        rate: upper bound on the probability of an exceedance under the null, given the past.
    """
    stake = 0.5 / rate  # half the largest stake that cannot ruin the bettor in one win, which keeps losses small
    win, lose = math.log1p(stake * (1 - rate)), math.log1p(-stake * rate)
    step = pl.when(pl.col("exceeds")).then(win).otherwise(lose)
    # Restarted from 1 where it fell below: a change late in a long run is found as fast as one at the beginning.
    total = step.cum_sum()
    lowest = pl.min_horizontal(total.cum_min().shift(1, fill_value=0.0).over(by), 0.0)
    return total.over(by) - lowest


def level(alpha: float) -> pl.Expr:
    """Log wealth at which to raise an alarm, for rows that are numbered from 1 in `update`.

    A bettor who starts at update j may win α / (j (j + 1)); over all starts that is α.
    """
    at = pl.col("update").cast(pl.Float64)
    return (at * (at + 1) / alpha).log()
