"""Parameters that a program freezes: a kind that is frozen in every run of it does not train.

Who fine-tunes says which kinds of parameters train: adapters, and neither norms nor embeddings. A kind is a class of modules and a name in it; it is frozen where
all parameters of the kind are, in all looks. A program that freezes nothing has no such rule, and breaks one of a family that does.

Catches a freezing that reaches some classes of modules only, is undone by a later call, or comes before the model is put together. Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.trace import Trace


@register
class Frozen(Relation):
    """A kind of parameters is frozen."""

    name = "frozen"
    code = "PR125"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0

    def survey(self, trace: Trace) -> pl.DataFrame:
        return _habits.survey(self.name, _every(trace), 1)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _every(trace), hypotheses)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({_frames.UPDATE}), frozenset({"data"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"parameters {hypothesis.text('what')} are frozen" + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        advice = "Look at what sets requires_grad, which modules it reaches, and what comes behind it."
        return _sightings.detail(example, advice, expected=f"requires_grad=False for all {hypothesis.text('what')}", function=_frames.UPDATE)


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "frozen", {"kinds": _kinds})


def _kinds(trace: Trace) -> pl.DataFrame:
    """One row a kind of parameter and update, of some updates: passed if all of the kind are frozen."""
    first = _frames.updates(trace).filter(pl.col("step") >= 0).sort("proc", "seq").unique(["proc", "step"], keep="first", maintain_order=True)
    first = _frames.first_of_each(first, ["proc", _frames.news(trace)], _sightings.MANY)
    known = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data") & (pl.col("module") != ""))
    looks = trace.states.select("proc", "var", "meta").unique(maintain_order=True).join(_frames.metas(trace, "requires_grad"), on="meta", how="left", maintain_order="left")
    held = looks.group_by("proc", "var", maintain_order=True).agg((pl.col("requires_grad") == "false").all().alias("frozen"))
    held = held.join(known.select("var", "name", "module", "kind"), on="var", how="inner", maintain_order="left").sort("proc", "name")
    kinds = held.group_by("proc", pl.concat_str("module", pl.lit("."), "kind").alias("what"), maintain_order=True).agg(
        pl.col("frozen").all().alias("passed"), (~pl.col("frozen")).sum().alias("_n"), pl.len().alias("_all"), pl.col("name").filter(~pl.col("frozen")).first().alias("_variable"),
    )  # fmt: skip
    rows = kinds.join(first.select("proc", "step", "seq", "site"), on="proc", how="inner", maintain_order="left")
    rows = _habits.with_family(trace, rows)
    return _sightings.example(rows, mode="kind", _seen=pl.format("{} of {} have requires_grad=True, such as {}", "_n", "_all", "_variable"), _variable=pl.col("_variable"))
