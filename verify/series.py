"""Curves of a run for people: loss, norms, updates and step times, per step and rank, small enough to be drawn.

Derived from what is recorded anyway, with one pass over the tables:

* `loss`: the number that `backward` was called on, the mean over the microbatches of a step; without one the user's own
  `proctor.meta(loss=…)`, or the last loss function's result before an update.
* `parameter_norm`, `gradient_norm`: Euclidean norm over all parameters that a rank holds (of shards: its shards), from the
  norm of each. Gradients are those of the last backward or clipping in a step.
* `update_ratio`: a lower bound of ‖Δθ‖/‖θ‖. A fingerprint tells that a tensor moved and not how far, so the distance is
  bounded from below by the change of each tensor's norm (reverse triangle inequality).
* `changed`: share of the tracked parameters that have other bits than before, exact by fingerprint.
* `step_time`: from the first record of a step to that of the next one, so evaluation between two steps is in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace

MAX_POINTS: Final = 500  # of one curve
MAX_ALONE: Final = 4  # ranks that have a curve of their own
MAX_LOSSES: Final = 3  # backward calls in the source that have a curve each
_APART: Final = 6.0  # distance from the other ranks at one step in ten, in median absolute deviations, that is shown
_NS: Final = 1e9
_GIVEN: Final = re.compile(r":backward\[(\d{1,3})\]$")


@dataclass(frozen=True)
class Curve:
    """Values by step, at most `MAX_POINTS` of them; extremes and the first non-finite value of a stretch are kept."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Series:
    """One quantity over the steps of a run.

    name: for machines: `loss`, `gradient_norm`.
    unit: "" where there is none.
    how: what exactly it is, one sentence.
    ranks: that it is known of.
    middle: the median over the ranks.
    low, high: least and greatest over the ranks; `None` of one rank.
    alone: ranks drawn on their own: all where they are few, else those that are apart from the rest.
    """

    name: str
    title: str
    unit: str
    how: str
    ranks: int
    middle: Curve
    low: Curve | None = None
    high: Curve | None = None
    alone: dict[int, Curve] = field(default_factory=dict)


def series(trace: Trace) -> list[Series]:
    """All curves that a trace allows, most telling first; those that it has no record of are left out."""
    made = [*_losses(trace), *_gradients(trace), *_parameters(trace), *_step_times(trace)]
    return [one for one in made if one is not None]


def curves(trace: Trace) -> dict[str, tuple[list[int], list[float]]]:
    """Name → steps and values (median over the ranks), for writers to other tools."""
    return {one.name: (one.middle.steps, one.middle.values) for one in series(trace)}


def thin(steps: Sequence[int], values: Sequence[float], limit: int = MAX_POINTS) -> Curve:
    """At most `limit` points: of each stretch of steps its least, its greatest and its first non-finite value."""
    count = len(steps)
    if count <= limit:
        return Curve(list(steps), [float(v) for v in values])
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(numbers)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), max(1, (limit - 2) // 3)):
        good, bad = stretch[finite[stretch]], stretch[~finite[stretch]]
        if len(good):
            kept |= {int(good[np.argmin(numbers[good])]), int(good[np.argmax(numbers[good])])}
        if len(bad):
            kept.add(int(bad[0]))
    order = sorted(kept)
    return Curve([int(steps[i]) for i in order], [float(numbers[i]) for i in order])


def named_loss(trace: Trace) -> list[tuple[int, float]]:
    """Values under `loss` in the user's own context, the last one of each step, of the process that came first."""
    named = trace.contexts.filter(pl.col("meta").str.contains('"loss"', literal=True) & (pl.col("step") >= 0))
    if named.is_empty():
        return []
    found: dict[int, float] = {}
    for step, text in named.filter(pl.col("proc") == named["proc"].min()).select("step", "meta").iter_rows():
        try:
            value = json.loads(text)["loss"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[step] = float(value)
    return sorted(found.items())


# -- loss ------------------------------------------------------------------------------------------------------------


def _losses(trace: Trace) -> list[Series | None]:
    numbers = _numbers(trace)
    backward = numbers.filter(pl.col("text").str.contains(_GIVEN.pattern))
    if backward.height:
        counts = backward.group_by("text").len().sort("len", "text", descending=[True, False])
        texts: list[str] = counts["text"].head(MAX_LOSSES).to_list()
        made = []
        for i, text in enumerate(texts):
            where = text.partition(":")[0]
            made.append(
                _over_ranks(
                    trace,
                    backward.filter(pl.col("text") == text).group_by("proc", "step").agg(pl.col("number").mean().alias("value")),
                    name="loss" if i == 0 else f"loss_{i + 1}",
                    title="Loss" if len(texts) == 1 else f"Loss {i + 1}",
                    how=f"the number that backward was called on in {where}"
                    + (f" (call {text[text.rindex('[') :]})" if len(texts) > 1 else "")
                    + "; the mean over microbatches",
                )
            )
        return made
    named = named_loss(trace)
    if named:
        steps, values = zip(*named, strict=True)
        return [Series("loss", "Loss", "", "as the program said: proctor.meta(loss=…)", 1, thin(steps, values))]
    last = numbers.filter(pl.col("text").str.ends_with(":loss()") & (pl.col("phase") == "train"))
    frame = last.group_by("proc", "step").agg(pl.col("number").last().alias("value"))
    return [_over_ranks(trace, frame, "loss", "Loss", how="the last result of a loss function before the update")]


def _numbers(trace: Trace) -> pl.DataFrame:
    """proc, step, phase, text, number of the plain numbers in training steps whose place speaks of a loss."""
    wanted = [i for i, text in enumerate(trace.places) if _GIVEN.search(text) or text.endswith(":loss()")]
    texts = pl.DataFrame(
        {
            "place": pl.Series(wanted, dtype=pl.UInt32),
            "text": pl.Series([trace.places[i] for i in wanted], dtype=pl.String),
        }
    )
    return (
        trace.values.filter(pl.col("kind") == int(Value.NUMBER))
        .join(texts, on="place", maintain_order="left")
        .join(trace.contexts.select("ctx", "step", "phase"), on="ctx", maintain_order="left")
        .filter(pl.col("step") >= 0)
        .select("proc", "step", "phase", "text", "number")
    )


# -- norms -----------------------------------------------------------------------------------------------------------


def _of_parameters(trace: Trace, attr: str) -> pl.DataFrame:
    """proc, var, step, norm, broken of what was read of the parameters, in order; another name of a tensor is left out."""
    own = trace.variables.filter((pl.col("attr") == attr) & (pl.col("role") == "parameter") & (pl.col("alias") == ""))
    unread = int(StateFlag.UNHASHED)
    return (
        trace.states.filter((pl.col("flags") & unread) == 0)
        .join(own.select("var"), on="var", how="semi", maintain_order="left")
        .join(trace.contexts.select("ctx", "step"), on="ctx", maintain_order="left")
        .select(
            "proc",
            "var",
            "step",
            "fp",
            pl.when(pl.col("norm").is_finite()).then(pl.col("norm").cast(pl.Float64)).alias("norm"),
            ((pl.col("flags") & int(StateFlag.NONFINITE)) > 0).alias("broken"),
            ((pl.col("flags") & int(StateFlag.NONE)) > 0).alias("none"),
        )
    )


def _gradients(trace: Trace) -> list[Series | None]:
    found = _of_parameters(trace, "grad").filter(~pl.col("none") & (pl.col("step") >= 0))
    last = (
        found.with_columns(pl.col("norm").fill_null(0.0))
        .group_by("proc", "step", "var")
        .agg(
            pl.col("norm").filter((pl.col("norm") > 0) | pl.col("broken")).last().fill_null(0.0),
            pl.col("broken").filter((pl.col("norm") > 0) | pl.col("broken")).last().fill_null(value=False),
        )
    )
    frame = last.group_by("proc", "step").agg(
        pl.when(pl.col("broken").any()).then(math.nan).otherwise((pl.col("norm") ** 2).sum().sqrt()).alias("value")
    )
    how = "Euclidean norm over all gradients that a rank holds, after the last backward or clipping of a step"
    return [_over_ranks(trace, frame, "gradient_norm", "Gradient norm", how=how)]


def _parameters(trace: Trace) -> list[Series | None]:
    known = pl.col("norm").forward_fill().over("proc", "var")
    before = pl.col("_norm").shift(1).over("proc", "var")
    rows = _of_parameters(trace, "data").with_columns(known.alias("_norm")).with_columns(
        before.alias("_before"),
        pl.col("fp").shift(1).over("proc", "var").alias("_fp"),
        pl.col("broken").cast(pl.Int32).alias("_broken"),
    )
    moved = rows.with_columns(
        (pl.col("_norm").fill_null(0.0) ** 2 - pl.col("_before").fill_null(0.0) ** 2).alias("_delta"),
        ((pl.col("_norm") - pl.col("_before")) ** 2).fill_null(0.0).alias("_distance"),
        (pl.col("_broken") - pl.col("_broken").shift(1).over("proc", "var").fill_null(0)).alias("_break"),
        pl.col("var").filter(pl.col("_fp").is_not_null() & (pl.col("_fp") != pl.col("fp"))).n_unique().over("proc", "step").alias("_moved"),
    )
    by_step = moved.group_by("proc", "step").agg(
        pl.col("_delta").sum(), pl.col("_distance").sum(), pl.col("_break").sum(), pl.col("_moved").first()
    ).sort("proc", "step")
    total = pl.col("_delta").cum_sum().clip(lower_bound=0.0).sqrt().over("proc")
    broken = pl.col("_break").cum_sum().over("proc") > 0
    sums = by_step.with_columns(pl.when(broken).then(math.nan).otherwise(total).alias("_total"))
    held = rows.group_by("proc").agg(pl.col("var").n_unique().alias("_vars"))
    sums = sums.with_columns(pl.col("_total").shift(1).over("proc").alias("_was")).join(held, on="proc", maintain_order="left")
    sums = sums.filter(pl.col("step") >= 0)
    norm = sums.select("proc", "step", pl.col("_total").alias("value"))
    ratio = sums.filter(pl.col("_was") > 0).select("proc", "step", (pl.col("_distance").sqrt() / pl.col("_was")).alias("value"))
    share = sums.select("proc", "step", (100.0 * pl.col("_moved") / pl.col("_vars")).alias("value"))
    return [
        _over_ranks(trace, norm, "parameter_norm", "Parameter norm", how="Euclidean norm over all parameters that a rank holds"),
        _over_ranks(
            trace, ratio, "update_ratio", "Relative update, at least",
            how="a lower bound of the update's norm over the parameters' norm, from the norm of each tensor",
        ),
        _over_ranks(
            trace, share, "changed", "Parameters that changed", unit="%", how="share of the tracked parameters with other bits than before"
        ),
    ]  # fmt: skip


# -- time ------------------------------------------------------------------------------------------------------------


def _step_times(trace: Trace) -> list[Series | None]:
    spans = (
        trace.calls.group_by("proc", "ctx")
        .agg(pl.col("t").min())
        .join(trace.contexts.select("ctx", "step"), on="ctx")
        .filter(pl.col("step") >= 0)
        .group_by("proc", "step")
        .agg(pl.col("t").min())
        .sort("proc", "step")
    )
    following = pl.col("step").shift(-1).over("proc") == pl.col("step") + 1
    until = pl.col("t").shift(-1).over("proc")
    frame = spans.with_columns(following.alias("_next"), until.alias("_until")).filter("_next")
    frame = frame.select("proc", "step", ((pl.col("_until") - pl.col("t")).clip(lower_bound=0) / _NS * 1e3).alias("value"))
    how = "from the first record of a step to that of the next; evaluation and saving in between are in it"
    return [_over_ranks(trace, frame, "step_time", "Step time", "ms", how)]


# -- ranks -----------------------------------------------------------------------------------------------------------


def _over_ranks(trace: Trace, frame: pl.DataFrame, name: str, title: str, unit: str = "", how: str = "") -> Series | None:
    """Fold proc, step, value into curves over the ranks; `None` with fewer than two steps."""
    if frame.is_empty() or frame["step"].n_unique() < 2:
        return None
    rows = (
        frame.join(trace.procs.select("proc", "rank"), on="proc")
        .group_by("rank", "step")
        .agg(pl.col("value").last())
        .with_columns(pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("_sound"))
    )
    by_step = (
        rows.group_by("step")
        .agg(
            pl.col("_sound").median().alias("middle"),
            pl.col("_sound").min().alias("low"),
            pl.col("_sound").max().alias("high"),
            pl.col("_sound").null_count().alias("broken"),
        )
        .sort("step")
    )
    steps: list[int] = by_step["step"].to_list()
    middle = by_step.select(pl.col("middle").fill_null(math.nan))["middle"].to_list()
    ranks = rows["rank"].n_unique()
    several = ranks > 1
    return Series(
        name=name,
        title=title,
        unit=unit,
        how=how,
        ranks=ranks,
        middle=thin(steps, middle),
        low=thin(steps, by_step["low"].fill_null(math.nan).to_list()) if several else None,
        high=thin(steps, by_step["high"].fill_null(math.nan).to_list()) if several else None,
        alone=_alone(rows, by_step, ranks) if several else {},
    )


def _alone(rows: pl.DataFrame, by_step: pl.DataFrame, ranks: int) -> dict[int, Curve]:
    chosen: list[int] = sorted(rows["rank"].unique().to_list()) if ranks <= MAX_ALONE else _apart(rows, by_step)
    found = {}
    for rank in chosen:
        own = rows.filter(pl.col("rank") == rank).sort("step")
        found[rank] = thin(own["step"].to_list(), own["value"].fill_null(math.nan).to_list())
    return found


def _apart(rows: pl.DataFrame, by_step: pl.DataFrame) -> list[int]:
    """Ranks that are not finite where the others are, or that keep a distance from the others."""
    joined = rows.join(by_step.select("step", "middle"), on="step").with_columns(
        (pl.col("_sound") - pl.col("middle")).abs().alias("_off")
    )
    spread = joined.group_by("step").agg(pl.col("_off").median().alias("_mad"))
    least = 1e-9 * pl.col("middle").abs() + 1e-300
    score = (
        joined.join(spread, on="step")
        .with_columns((pl.col("_off") / pl.max_horizontal("_mad", least)).alias("_score"))
        .group_by("rank")
        .agg(pl.col("_score").quantile(0.9), (pl.col("_sound").is_null() & pl.col("middle").is_not_null()).any().alias("_broken"))
        .filter(pl.col("_broken") | (pl.col("_score") > _APART))
        .sort("_broken", "_score", "rank", descending=[True, True, False])
        .head(MAX_ALONE)
    )
    found: list[int] = sorted(score["rank"].to_list())
    return found


def extent(values: Sequence[float]) -> tuple[float, float] | None:
    """Least and greatest finite value."""
    finite: list[Any] = [v for v in values if math.isfinite(v)]
    return (min(finite), max(finite)) if finite else None
