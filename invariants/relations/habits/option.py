"""Options by kind of parameter: what has less of an option than the rest has less in every run of the program.

An optimizer with several groups tells kinds of parameters apart: norms and biases without weight decay, embeddings at another
rate. `none`: the option is 0 for this kind while it is not for others of the same optimizer. `less`: it is less than the most
that others have. `most`: none has more. What the numbers are is up to the user; who has less is up to the program. `some`: an option that rests is
not 0 for all that optimizers of a class hold.

Catches weight decay that reaches norms, groups that were swapped or merged into one, a group that lost its own learning rate, an option of a configuration that does not reach the optimizer.
An option that is the same for all, in health, has no rule. Source: ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.calls import ENOUGH
from proctor.invariants.trace import Trace

_RANKS: Final = ("none", "less", "most")
_SAYS: Final = {
    "none": "no {option} for {kind} where others of the optimizer have some",
    "less": "less {option} for {kind} than for others of the optimizer",
    "most": "no kind of the optimizer with more {option} than {kind}",
    "some": "{option} of {kind} is not 0 in all its groups",
}
_ROUNDING: Final = 1e-9  # relative


@register
class Option(Relation):
    """A kind of parameters has its rank among the groups of its optimizer."""

    name = "option"
    code = "PR117"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = 0

    def survey(self, trace: Trace) -> pl.DataFrame:
        return _habits.survey(self.name, _every(trace), 1)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _every(trace), hypotheses)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(frozenset({_frames.UPDATE}), frozenset({"data"}), frozenset({"option"}))

    def say(self, hypothesis: Hypothesis) -> str:
        option, _, kind = hypothesis.text("what").partition(" of ")
        if hypothesis["mode"] == "some":
            return _SAYS["some"].format(option=option, kind=kind) + _habits.of_programs(hypothesis)
        return "the groups of an optimizer give " + _SAYS[hypothesis.text("mode")].format(option=option, kind=kind) + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        option, _, kind = hypothesis.text("what").partition(" of ")
        return Detail(
            expected=_SAYS[hypothesis.text("mode")].format(option=option, kind=kind),
            seen=example["_seen"] or "",
            function=_frames.UPDATE,
            variable=example["_variable"] or "",
            advice=f"Look at how the parameter groups are made: which parameters are in which group, and what {option} it has.",
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "option", {"ranks": _ranks, "some": _some})


def _ranks(trace: Trace) -> pl.DataFrame:
    """One row a rank, option, kind and look at it; passed if all parameters of the kind have this rank."""
    seen = _ranked(trace)
    if seen.is_empty():
        return pl.DataFrame(schema=_sightings.EXAMPLE)
    at = ["proc", "seq", "step", "held", "place"]
    kinds = seen.group_by(*at, "kind", maintain_order=True).agg(
        pl.col("rank").unique().sort().alias("ranks"), pl.col("number").min().alias("least"), pl.col("number").max(),
        pl.col("top").first(), pl.col("name").first(), pl.col("differs").first(),
    )  # fmt: skip
    wanted = pl.DataFrame({"mode": list(_RANKS)})
    rows = kinds.join(wanted, how="cross", maintain_order="left")
    one = (pl.col("ranks").list.len() == 1) & (pl.col("ranks").list.first() == pl.col("mode"))
    # An option that is the same for all says nothing for a rule, and yet breaks one.
    rows = rows.with_columns(one.alias("passed")).filter(~pl.col("passed") | pl.col("differs"))
    rows = rows.with_columns(pl.concat_str("place", pl.lit(" of "), "kind").alias("what"))
    rows = _sightings.thin(rows.sort("proc", "seq", maintain_order=True), ["proc", "mode", "what"])
    rows = _habits.with_family(trace, _sightings.sites(trace, rows))
    seen_text = pl.concat_str(
        "place", pl.lit(" of "), "name", pl.lit(" is "), pl.col("least").round_sig_figs(4),
        pl.when(pl.col("least") < pl.col("number")).then(pl.concat_str(pl.lit(" to "), pl.col("number").round_sig_figs(4))).otherwise(pl.lit("")),
        pl.lit(", and the most in its optimizer is "), pl.col("top").round_sig_figs(4),
    )  # fmt: skip
    return _sightings.example(rows, _seen=seen_text, _variable=pl.col("name"))


def _some(trace: Trace) -> pl.DataFrame:
    """One row a first look at an option that rests and class of optimizers: passed if a group has more than 0 of it."""
    rows = _sightings.options(trace).drop("step")
    calls = _frames.updates(trace).select("proc", "seq", "step", "optimizer", pl.col("kind").alias("_class"))
    rows = rows.join(calls, on=["proc", "seq"], how="inner", maintain_order="left").drop_nulls(["optimizer", "_class"]).sort("proc", "seq", maintain_order=True)
    mine = ["proc", "optimizer", "_class", "text"]
    # A rate that begins or ends at 0 is a schedule's.
    rests = pl.col("number").n_unique().over(*mine, "item") == 1
    rows = rows.filter(rests.all().over(mine)).group_by(*mine, "seq", "step", maintain_order=True).agg(pl.col("number").max(), (pl.col("number") >= 0).all().alias("_counts"))
    rows = rows.filter(pl.int_range(pl.len()).over(mine) < ENOUGH)
    # Of a group whose number was lost, nobody knows whether it was 0.
    whole = ~pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    some = pl.col("number") > 0
    rows = rows.filter("_counts").with_columns(pl.when(some | whole).then(some).alias("passed"), pl.concat_str("text", pl.lit(" of "), pl.col("_class").str.split(".").list.last()).alias("what"))
    rows = _habits.with_family(trace, _sightings.sites(trace, rows))
    return _sightings.example(rows, mode="some", _seen=pl.concat_str("text", pl.lit(" is 0 in all groups of "), "optimizer"), _variable=pl.col("text"))


def _ranked(trace: Trace) -> pl.DataFrame:
    """One row a parameter and look at an option of its group: proc, seq, step, held, place, kind, name, number, top, rank, differs."""
    rows = _sightings.options(trace)
    calls = _frames.calls_of(trace, re.escape(_frames.UPDATE)).select("proc", "seq", "args")
    rows = rows.join(calls, on=["proc", "seq"], how="inner", maintain_order="left")
    rows = rows.join(_frames.arguments(trace, rows["args"], held="0.name"), on="args", how="left", maintain_order="left")
    look = ["proc", "seq", "text"]
    top = pl.col("number").max().over(look)
    rows = rows.with_columns(top.alias("top"), (top - pl.col("number").min().over(look) > top.abs() * _ROUNDING).alias("differs"))
    # Without any of an option nobody has less of it: a user may choose that.
    rows = rows.filter((pl.col("top") > 0) & (pl.col("number") >= 0).all().over(look))
    most, none = pl.col("number") >= pl.col("top") * (1 - _ROUNDING), pl.col("number") == 0
    rank = pl.when(most).then(pl.lit("most")).when(none).then(pl.lit("none")).otherwise(pl.lit("less"))
    rows = rows.select(
        "proc", "seq", "step", "held", pl.col("text").alias("place"), pl.col("item").cast(pl.String).alias("group"), "number", "top",
        rank.alias("rank"), "differs",
    )  # fmt: skip
    return rows.join(members(trace), on=["proc", "held", "group"], how="inner", maintain_order="left")


def members(trace: Trace) -> pl.DataFrame:
    """Parameters by group: proc, held (by which optimizer), group, kind, name. Those that changed their group are in the last."""
    known = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    seen = trace.states.group_by("proc", "var", maintain_order=True).agg(pl.col("meta").last())
    seen = seen.join(known.select("var", "name", "module", "kind"), on="var", how="inner", maintain_order="left")
    seen = seen.join(_frames.metas(trace, "optimizer", "group"), on="meta", how="left", maintain_order="left").drop_nulls(["optimizer", "group"])
    kind = pl.concat_str("module", pl.lit("."), "kind")
    return seen.select("proc", pl.col("optimizer").alias("held"), "group", kind.alias("kind"), "name").sort("proc", "name")
