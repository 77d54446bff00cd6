"""A number of the program that varies in health is not the same all the time: a term of the loss, what a function of the user returns.

Of each number that the program's own functions compute or return (`instrument/probes/numbers.py`) the first eight looks count, within
the first sixteen steps: what is constant later may have been learned or have run out. A rule is of a number that is another at each of these looks
in all healthy runs of a program, and is no whole number: a loss goes up and down, and a weight that is annealed goes one way. Counters are none.
What a backward is given is held against the numbers beside it (`_terms`): `whole`, `each` and `shared`, it is the loss that torch's function gave, or its share; `more`, it is
no fixed multiple of one of its terms.

Catches a term that is always 0 (a detached or wrong input, an empty mask, a weight that was lost), a metric of the wrong labels, a
reward that never comes, a term that is left out of the sum, a loss that is divided once more. Of numbers on a device nothing is known: to read them would wait for it. Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Relation, register
from proctor.invariants.relations.habits import _terms
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.losses import LOSSES
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace

_LOOKS: Final = 8
_STEPS: Final = 16
_DISTINCT: Final = 8  # all: of a share of a few samples, such as an accuracy, some are equal, and all may be for a while
_MODE: Final = "varies"
_KNOWN: Final = {"proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "text": pl.String, "number": pl.Float64}


@register
class Varies(Relation):
    """A number is not constant."""

    name = "varies"
    code = "PR119"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = None  # the first looks, which windows of later steps remember

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        found = _found(trace)
        # What neither is constant nor another at each look says nothing for a rule, and breaks none.
        return _habits.survey(self.name, found.filter(~pl.col("passed") | pl.col("_varied")).drop("_varied"), 1)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _found(trace).drop("_varied"), hypotheses)

    def remember(self, trace: Trace, first: int, end: int) -> pl.DataFrame | None:
        return _numbers(trace).filter(pl.col("step") < end)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({_frames.UPDATE, "torch.Tensor.backward", _function(hypothesis), *(LOSSES if hypothesis["mode"] in _TERMS else ())}), values=frozenset({"number"}))

    def say(self, hypothesis: Hypothesis) -> str:
        if hypothesis["mode"] != _MODE:
            return _TERMS[hypothesis.text("mode")].format(*_both(hypothesis)) + _habits.of_programs(hypothesis)
        return f"{_named(hypothesis)} is not the same at its first {_LOOKS} looks" + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        if hypothesis["mode"] != _MODE:
            return Detail(
                expected=_TERMS[hypothesis.text("mode")].format(*_both(hypothesis)),
                seen=example["_seen"] or "",
                function=_function(hypothesis),
                variable="loss",
                advice="Look at how the loss is put together before backward: a term that is multiplied by 0, left out or detached, a division.",
            )
        return Detail(
            expected=f"{_named(hypothesis)} varies, as it does in healthy runs",
            seen=example["_seen"] or "",
            function=_function(hypothesis),
            variable=hypothesis.text("what").rpartition(":")[2],
            advice="Look at what it is computed from: an input that is empty, detached, masked or of the wrong source, or a weight of 0.",
        )


_TERMS: Final = {
    "whole": "{0} is given the loss that torch's function gave",
    "each": "{0} is given the loss that torch's function gave, each time in a step",
    "shared": "{0} is given the loss that torch's function gave, divided by the backwards of the step",
    "more": "{0} is given more than a fixed multiple of {1}",
}


def _both(hypothesis: Hypothesis) -> tuple[str, str]:
    """The backward in its function, and the number beside it."""
    given, _, beside = hypothesis.text("what").partition(_terms.BETWEEN)
    return f"backward in {given.rpartition(':')[0]}", "the last loss" if beside == _terms.LOSS else beside


def _function(hypothesis: Hypothesis) -> str:
    return hypothesis.text("what").partition(_terms.BETWEEN)[0].rpartition(":")[0]


def _named(hypothesis: Hypothesis) -> str:
    function, _, name = hypothesis.text("what").rpartition(":")
    return f"the result of {function}" if name == "return" else f"{name} in {function}"


def _numbers(trace: Trace) -> pl.DataFrame:
    """Every look at a number in the first steps, and one row without a text for each of these steps that was recorded."""
    return _frames.memo(trace, "varies numbers", _find_numbers)


def _find_numbers(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sightings(trace, Value.NUMBER).filter(pl.col("step").is_between(-1, _STEPS - 1) & pl.col("number").is_finite())
    # Of a call, its function tells its result.
    rows = rows.filter(~pl.col("text").str.ends_with(")") | pl.col("text").str.ends_with(":" + _terms.LOSS))
    rows = rows.select(pl.col(c).cast(t) for c, t in _KNOWN.items())
    steps = _frames.seen_steps(trace).filter(pl.col("step").is_between(0, _STEPS - 1))
    steps = steps.select(pl.col(c).cast(t) if c in ("proc", "step") else pl.lit(None, dtype=t).alias(c) for c, t in _KNOWN.items())
    past = trace.past.get("varies")
    both = pl.concat([*([past] if past is not None else []), rows, steps]).unique(maintain_order=True)
    return both.sort("proc", "text", "step", "seq", maintain_order=True)


def _looks(trace: Trace) -> pl.DataFrame:
    """The first looks at each number, and the rows of steps. A variable has one value in a step, a result has one for each call."""
    both = _numbers(trace).filter(pl.col("text").is_null() | ~pl.col("text").str.ends_with(")"))
    result = pl.col("text").str.ends_with(":return") | pl.col("text").is_null()
    both = both.filter(result | (pl.int_range(pl.len()).over("proc", "text", "step") == 0))
    return both.filter(pl.col("text").is_null() | (pl.int_range(pl.len()).over("proc", "text") < _LOOKS))


def _found(trace: Trace) -> pl.DataFrame:
    """Examples of all modes, with `_varied`: whether they say something for a rule."""
    return _frames.memo(trace, "varies", _find)


def _find(trace: Trace) -> pl.DataFrame:
    beside = _terms.pairs(_numbers(trace))
    return pl.concat([_every(trace), *(_terms.lossy(trace, make(trace, beside)) for make in (_terms.whole, _terms.more))])


def _every(trace: Trace) -> pl.DataFrame:
    """Looks from the fifth to the eighth: passed once the number has varied, failed if it has not at the eighth."""
    looks = _looks(trace)
    steps = looks.filter(pl.col("text").is_null()).group_by("proc").agg(pl.col("step").n_unique().alias("_steps"), pl.col("step").max().alias("_last"))
    mine, number = ["proc", "text"], pl.col("number")
    rows = looks.drop_nulls("text").with_columns(
        (number != number.first()).cum_max().over(mine).alias("_other"), pl.int_range(1, pl.len() + 1).over(mine).alias("_nth"),
        pl.len().over(mine).alias("_looks"), (number.n_unique() >= _DISTINCT).over(mine).alias("_many"),
        (number != number.round()).any().over(mine).alias("_fraction"),
    )
    rows = rows.filter((pl.col("_looks") == _LOOKS) & (pl.col("_nth") > _LOOKS // 2) & (pl.col("_other") | (pl.col("_nth") == _LOOKS)))
    rows = rows.join(steps, on="proc", how="left", maintain_order="left")
    # Steps that were not recorded, or are not held any more, may have had other looks.
    gap = pl.col("_steps").fill_null(0) <= pl.col("_last").fill_null(0)
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    rows = rows.with_columns(
        pl.when(pl.col("_other") | ~(gap | lossy)).then("_other").alias("passed"), (pl.col("_many") & pl.col("_fraction")).alias("_varied")
    )
    rows = _habits.with_family(trace, _sightings.sites(trace, rows))
    found = _sightings.example(rows, mode=_MODE, what=pl.col("text"), _seen=pl.format("{} at each of its first {} looks", "number", "_nth"))
    return found.with_columns(rows["_varied"])
