"""Averages of weights are averages: a copy lies between its old value and the model, at one rate for all its tensors.

`after`: in each step in which a copy moves, it moves towards the model as the step left it. `before`: towards the model as it
was before the step, as in programs that average in their forward. `steady`: at the rate of the step before. `moves`: in every
step. These are habits of a program, held where all runs of its family keep them. `between`: a copy that has moved as an average
goes on so, `away`: none moves away from the model, along the line between the two, `keeps`: none goes more than nine tenths of the way, and not all of it, move by move, and `starts`: what moves as an average began as a copy
of the model; of any program.

Catches an average that is taken before the update, of another model or of an old one, that misses some tensors, whose two sides
or weights are swapped, whose decay drifts, one that began with weights of its own, one that is not updated any more, and one that is pushed away from the model (a sign). Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Relation, _surveys, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import unseen
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace

_HABITS: Final = ("after", "before", "steady", "moves")
_GENERAL: Final = ("between", "away", "keeps", "starts")
_ROUNDING: Final = 16.0  # units of rounding that an average in place may deviate by
_TOLD: Final = 256.0  # units below which a move, or a distance, is too small to tell a rate from
_MOST: Final = 0.9  # of the way to the model; a decay that warms up begins with less
_SEVERAL: Final = 3  # steps in a row
_LEAST: Final = 4  # steps in which a habit was kept
_WHAT: Final = "copy"
_SAYS: Final = {
    "after": "a copy of the model moves towards the model as the update left it, at one rate for all tensors",
    "before": "a copy of the model moves towards the model as it was before the update, at one rate for all tensors",
    "steady": "a copy of the model moves at the rate at which it moved in the step before",
    "moves": "a copy of the model moves in every step",
    "between": "a copy of the model that has moved as an average lies between its old value and the model",
    "keeps": "a copy of the model that moves as an average keeps more than a tenth of itself",
    "starts": "what moves as an average of the model began as a copy of it",
    "away": "a copy of the model that moves along the line between itself and the model moves towards the model",
}
_ADVICE: Final = {
    "after": "Update the average after optimizer.step, from the model that is trained, for all parameters; average.mul_(decay).add_(model, "
    "alpha=1 - decay).",
    "before": "Look at where the average is updated, and from which model.",
    "steady": "Look at what the decay is computed from, and at how often the average is updated in a step.",
    "moves": "Look at what decides whether the average is updated, and which object it is that is updated.",
    "between": "Look for tensors that the average misses or takes from another model, and for writes to it by others.",
    "keeps": "Look at the two weights: average = decay * average + (1 - decay) * model, with a decay near 1.",
    "starts": "Copy the model's weights into it before the training: target.load_state_dict(model.state_dict()), or copy.deepcopy(model).",
    "away": "Look at the sign: average += (model - average) * rate; a difference the other way round has to be subtracted.",
}


@register
class Average(Relation):
    """Copies of a model move as averages of it."""

    name = "average"
    code = "PR116"
    upstream: ClassVar[int] = 4
    ahead: ClassVar[int] = 1  # a copy may move after the update, until the next step begins
    reach: ClassVar[int | None] = 1

    def survey(self, trace: Trace) -> pl.DataFrame:
        found = _every(trace)
        habits = found.filter(pl.col("mode").is_in(_HABITS) & pl.col("passed").is_not_null() & pl.col("family").is_not_null())
        told = habits.group_by("mode", "family").agg(pl.col("passed").all().alias("kept"), pl.len().alias("n"))
        seen = {Hypothesis.of(self.name, mode=mode, what=_WHAT, family=family): (kept, n) for mode, family, kept, n in told.iter_rows()}
        general = [Hypothesis.of(self.name, mode=mode, what=_WHAT) for mode in _GENERAL if found.filter((pl.col("mode") == mode) & pl.col("passed")).height]
        held = [h for h, (kept, n) in seen.items() if not kept or n >= _LEAST]
        return _surveys.of_hypotheses([*held, *general], [h for h, (kept, _) in seen.items() if not kept])

    def idle(self, trace: Trace) -> bool:
        return unseen(trace, Value.AVERAGE)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return Examples(_sightings.bound_examples(trace, _every(trace), hypotheses).frame.drop("family"), ())

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Where and how fast to average is a habit; that an average stays one is broken by programs that restart theirs."""
        return Standing.CHOICE if hypothesis["mode"] in _GENERAL else Standing.HABIT

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({MODEL_CALL, _frames.UPDATE}), values=frozenset({"average"}))

    def say(self, hypothesis: Hypothesis) -> str:
        models = sorted({word.split("/")[0].removeprefix("__main__.") for word in hypothesis.text("family").split()})
        where = f", in programs of {', '.join(models)}" if models else ""
        return _SAYS[hypothesis.text("mode")] + where

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return _sightings.detail(example, _ADVICE[hypothesis.text("mode")], function=_frames.UPDATE)


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "average", {"moves": _moves, "begins": _begins})


def _measured(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sightings(trace, Value.AVERAGE).join(_frames.metas(trace, "side"), on="meta", how="left", maintain_order="left")
    return rows.filter(pl.col("number").is_finite() & pl.col("norm").is_finite()).with_columns(pl.col("norm").cast(pl.Float64))


def _begins(trace: Trace) -> pl.DataFrame:
    """Examples of `starts`: some of each copy. A single tensor of several that is far away is no sign: it may have been drawn anew, as a head is."""
    far, of = pl.col("number"), pl.col("norm")
    passed = pl.when(far == 0).then(True).when((far >= 2) | (far == of)).then(False)
    rows = _measured(trace).filter(pl.col("side") == "begin").with_columns(passed.alias("passed"))
    seen = pl.format("when it first moved as an average, {} of {} tensors that were looked at were far from the model's", far.cast(pl.Int64), of.cast(pl.Int64))
    return _sightings.example(rows.filter(pl.col("passed").is_not_null()), mode="starts", what=_WHAT, _variable=pl.col("text"), _seen=seen, _expected=pl.lit(_SAYS["starts"]))


def _steps(trace: Trace) -> pl.DataFrame:
    """One row a copy and step: proc, step, text (the copy), rate and off of both sides, move, gap."""
    rows = _measured(trace)
    key = ["proc", "step", "text"]
    found = rows.filter(pl.col("side") == "move").select(*key, pl.col("number").alias("move"), pl.col("norm").alias("gap"))
    for side in ("now", "old"):
        one = rows.filter(pl.col("side") == side).select(*key, pl.col("number").alias(f"rate_{side}"), pl.col("norm").alias(f"off_{side}"))
        found = found.join(one, on=key, how="inner", maintain_order="left")
    return found.unique(key, keep="first", maintain_order=True).sort("proc", "text", "step")


def _moves(trace: Trace) -> pl.DataFrame:
    """Examples of all modes."""
    rows = _steps(trace)
    for side in ("now", "old"):
        between = (pl.col(f"rate_{side}") > 0) & (pl.col(f"rate_{side}") < 1 + 1e-3)
        # A rate that is itself rounded shows in the move.
        rows = rows.with_columns((between & (pl.col(f"off_{side}") <= _ROUNDING)).alias(side))
    moved = pl.col("move") >= _TOLD
    part = (pl.col("now") & (pl.col("rate_now") < 0.999)) | (pl.col("old") & (pl.col("rate_old") < 0.999))
    group = ["proc", "text"]
    after_next = (pl.col("step") - pl.col("step").shift(1)).over(group) == 1
    rows = rows.with_columns(
        moved.alias("_moved"),
        (part & moved).shift(1).over(group).fill_null(value=False).alias("_was"),
        pl.col("rate_now").shift(1).over(group).alias("_rate_before"),
        (pl.col("now") & moved).shift(1).over(group).fill_null(value=False).alias("_fit_before"),
        after_next.fill_null(value=False).alias("_next"),
        (_ROUNDING * 4 / pl.col("move")).alias("_room"),
    ).with_columns((_ROUNDING * 4 / pl.col("move").shift(1).over(group)).alias("_room_before"))
    same = (pl.col("rate_now") - pl.col("_rate_before")).abs() <= pl.col("rate_now") * (pl.col("_room") + pl.col("_room_before") + 1e-3)
    modes = {
        "after": (pl.col("_moved"), pl.col("now")),
        "before": (pl.col("_moved"), pl.col("old")),
        "steady": (pl.col("_moved") & pl.col("_next") & pl.col("_fit_before") & pl.col("now"), same),
        "moves": (pl.col("gap") >= _TOLD, pl.col("move") > 0),
        "between": (pl.col("_moved") & pl.col("_next") & pl.col("_was"), pl.col("now") | pl.col("old")),
    }
    # All of the way is a copy, which is made anew in each step.
    swapped = pl.col("now") & moved & (pl.col("rate_now") > _MOST) & (pl.col("gap") >= 4 * _ROUNDING)
    before = [pl.col("_swapped").shift(k).over(group) & ((pl.col("step") - pl.col("step").shift(k)).over(group) == k) for k in range(1, _SEVERAL)]
    rows = rows.with_columns(swapped.alias("_swapped")).with_columns(pl.all_horizontal(pl.col("_swapped"), *before).fill_null(value=False).alias("_swapped"))
    # One that moves in each tenth step, say, is counted by the probe.
    counted = _measured(trace).filter(pl.col("side") == "keeps").select("proc", "step", "text", pl.lit(value=True).alias("_counted")).unique()
    rows = rows.join(counted, on=["proc", "step", "text"], how="left", maintain_order="left").with_columns((pl.col("_swapped") | pl.col("_counted").fill_null(value=False)).alias("_swapped"))
    modes["keeps"] = (pl.col("now") & moved, ~pl.col("_swapped"))
    rate = pl.col("rate_now").round_sig_figs(4)
    seen = {
        "steady": pl.concat_str(pl.lit("rate "), rate, pl.lit(" after "), pl.col("_rate_before").round_sig_figs(4)),
        "moves": pl.lit("it stayed as it was"),
    }
    off = pl.concat_str(
        pl.lit("a move that deviates from one rate ("), rate, pl.lit(") by "), pl.col("off_now").round_sig_figs(3),
        pl.lit(" units of rounding"), pl.when("old").then(pl.lit("; it fits the model before the update")).otherwise(pl.lit("")),
    )  # fmt: skip
    exact = [(pl.col(f"off_{side}") <= _ROUNDING, pl.col(f"rate_{side}")) for side in ("now", "old")]
    told = (pl.col("move") >= _TOLD) & (pl.col("gap") >= _TOLD)
    modes["away"] = (told & pl.any_horizontal(fits & (speed != 0) for fits, speed in exact), pl.any_horizontal(fits & (speed > 0) for fits, speed in exact))
    seen["keeps"] = pl.concat_str(pl.lit("it goes "), rate, pl.lit(f" of the way to the model, {_SEVERAL} moves in a row"))
    seen["away"] = pl.concat_str(pl.lit("it moves away from the model, by "), (-pl.col("rate_now")).round_sig_figs(4), pl.lit(" of the distance"))
    parts = []
    for mode, (about, passed) in modes.items():
        one = rows.filter(about).with_columns(passed.alias("passed"), seen.get(mode, off).alias("_seen"))
        one = one.filter(pl.int_range(pl.len()).over("proc", "text", "passed", _frames.news(trace)) < _sightings.MANY)
        if mode in _HABITS:
            one = one.join(trace.families, on="proc", how="left", maintain_order="left")
        parts.append(_sightings.example(one, mode=mode, what=_WHAT, _variable=pl.col("text"), _expected=pl.lit(_SAYS[mode])))
    return pl.concat(parts)
