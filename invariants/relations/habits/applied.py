"""The gradient that an update applies is what the backwards since the last update have summed up.

`only`: nothing but backward, clipping and the unscaling of a loss scaler writes a gradient before it is applied. `kept`: what a
backward gave is not thrown away before the update that follows, so that every microbatch counts. `once`: between two backwards a
model runs forward, so that no loss is propagated twice. `clipped`: a step that propagates clips. `anew`: between two updates
of an optimizer there is a backward. All are habits of a program, held where all its runs keep them: to scale
gradients by hand, to average them over ranks, to clear those that another model's loss gave, or to propagate several losses of one
forward, is a way to train.

Catches gradients that are scaled or unscaled twice, edited between backward and update, overwritten or cleared between
microbatches, or counted twice, in all or in some parameters. The sum itself is not checked: what one backward adds can be told from what was there
before only inside of autograd, and we hook no graph of the user's. A write through `.data` moves no version counter, and is missed.
Source: ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL, CallFlag, StateFlag
from proctor.invariants.trace import Trace

_REWRITES: Final = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_", "torch.amp.GradScaler.unscale_")
_CLIPS: Final = _REWRITES[:2]
_SCALED: Final = "torch.amp.GradScaler.step"
_LEAST: Final = 4  # updates in which a habit was kept
_WHAT: Final = "gradients"
_SAYS: Final = {
    "only": "nothing but backward, clipping and unscaling writes the gradients that an update applies",
    "kept": "no gradient is cleared between a backward and the update that follows it",
    "anew": "a backward comes between an update and the next one of its optimizer",
    "clipped": "gradients are clipped in each step that has a backward",
    "once": "a model runs forward between a backward and the next one",
}
_ADVICE: Final = {
    "only": "Look for what scales, averages or overwrites gradients by hand between backward and optimizer.step.",
    "kept": "Look for a zero_grad, or a gradient set to None, between the microbatches of one update.",
    "anew": "Look for a second optimizer.step: it uses the gradients of the first once more.",
    "clipped": "Look for the clipping between backward and the update.",
    "once": "Look for a second backward of the same loss (retain_graph=True): its gradient counts double.",
}


@register
class Applied(Relation):
    """What an update applies is what was accumulated for it."""

    name = "applied"
    code = "PR120"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 3
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = 1
    reads: ClassVar[Reads] = "records"
    alone: ClassVar[bool] = True
    absence: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        return _habits.survey(self.name, _every(trace), _LEAST)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _habits.examples(trace, _every(trace), hypotheses)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["mode"] == "anew":
            return Needs(frozenset({_frames.UPDATE, *_frames.BACKWARDS}))
        if hypothesis["mode"] == "clipped":
            return Needs(frozenset({_frames.UPDATE, *_frames.BACKWARDS, *_CLIPS}))
        if hypothesis["mode"] == "once":
            return Needs(frozenset({_frames.UPDATE, MODEL_CALL, *_frames.BACKWARDS}))
        return Needs(frozenset({_frames.UPDATE, _SCALED, *_frames.BACKWARDS, *_REWRITES}), frozenset({"grad"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return _SAYS[hypothesis.text("mode")] + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode = hypothesis.text("mode")
        return Detail(
            expected=_SAYS[mode],
            seen=example["_seen"] or "",
            function={"clipped": _CLIPS[0], "anew": _frames.UPDATE}.get(mode) or example["_function"] or _frames.BACKWARDS[0],
            variable=example["_variable"] or "",
            advice=_ADVICE[mode],
        )


def _every(trace: Trace) -> pl.DataFrame:
    return _sightings.of_parts(trace, "applied", {"only": _only, "kept": _kept, "once": _once, "clipped": _clipped, "anew": _anew})


def _moment(edge: pl.Expr) -> pl.Expr:
    """Orders what was seen after a call behind what was seen before it."""
    return (2 * pl.col("seq").cast(pl.Int64) + (edge == 1).cast(pl.Int64)).alias("moment")


def _changes(trace: Trace) -> pl.DataFrame:
    """Changes of gradients between two updates of their optimizer, in order: proc, optimizer, var, update, step, line, wrote, by, empty, name."""
    return _frames.memo(trace, "applied changes", _find_changes)


def _find_changes(trace: Trace) -> pl.DataFrame:
    grads = trace.variables.filter((pl.col("attr") == "grad") & (pl.col("alias") == "")).select("var", "name")
    rows = _frames.rows(trace).join(grads, on="var", how="inner", maintain_order="left")
    rows = rows.join(_frames.metas(trace, "optimizer"), on="meta", how="left", maintain_order="left").drop_nulls("optimizer")
    names = pl.DataFrame({"fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32), "by": pl.Series(trace.functions, dtype=pl.String)})
    calls = trace.calls.select("proc", pl.col("seq").alias("call"), "fn").join(names, on="fn", how="left")
    rows = rows.select("proc", "optimizer", "var", "name", "call", "edge", _moment(pl.col("edge")), (_frames.has(int(StateFlag.NONE | StateFlag.ZERO))).alias("empty"))
    rows = rows.join(calls, on=["proc", "call"], how="left", maintain_order="left").with_columns((pl.col("edge") == 1).alias("_after"))
    rows = rows.with_columns(
        (pl.col("_after") & pl.col("by").is_in(_frames.BACKWARDS)).fill_null(value=False).alias("wrote"),
        (pl.col("_after") & pl.col("by").is_in([*_frames.BACKWARDS, *_REWRITES])).fill_null(value=False).alias("told"),
    )
    # With a closure an update uses gradients of its own.
    searches = _frames.inner_backwards(trace).select("proc", pl.col("update").alias("seq")).unique()
    updates = _frames.updates(trace).drop_nulls("optimizer").join(searches, on=["proc", "seq"], how="anti", maintain_order="left").filter(pl.col("step") >= 0)
    updates = updates.with_columns(_moment(pl.lit(0))).select("proc", "optimizer", "moment", "step", "phase", pl.col("site").alias("line"), pl.col("seq").alias("update"))
    rows = rows.sort("moment", maintain_order=True).join_asof(
        updates.sort("moment"), on="moment", by=["proc", "optimizer"], strategy="forward", check_sortedness=False
    )
    return rows.drop_nulls("update").sort("proc", "moment", maintain_order=True)


def _only(trace: Trace) -> pl.DataFrame:
    """One row an update: passed if nothing but those that may has written its gradients since their first backward."""
    mine = ["proc", "optimizer", "update"]
    over = [*mine, "var"]
    rows = _changes(trace).with_columns(pl.col("wrote").cum_max().over(over).alias("_since"))
    rows = rows.with_columns((pl.col("_since") & ~pl.col("told") & ~pl.col("empty")).alias("_bad"))
    # Of a gradient that no backward gave, as in an optimizer that is fed by hand, nothing is expected.
    each = rows.group_by(over, maintain_order=True).agg(pl.col("step", "line", "name", "empty").last(), pl.col("_since", "_bad").any())
    bad = pl.col("_bad")
    found = each.filter(pl.col("_since") & ~pl.col("empty")).group_by(mine, maintain_order=True).agg(
        pl.col("step", "line").first(), (~bad).all().alias("passed"), bad.sum().alias("_n"), pl.len().alias("_of"),
        pl.col("name").sort_by(~bad, maintain_order=True).first(),
    )  # fmt: skip
    seen = pl.format("{} of {} gradients were written by something else after their backward", "_n", "_of")
    return _finish(trace, found, "only", seen)


def _kept(trace: Trace) -> pl.DataFrame:
    """One row an update: passed if none of its gradients was cleared behind a backward that wrote it, and then written again."""
    mine = ["proc", "optimizer", "update"]
    rows = _changes(trace)
    over = [*mine, "var"]
    held = pl.col("wrote") & ~pl.col("empty")
    thrown = pl.col("empty") & held.cum_max().over(over)
    again = held & thrown.cum_max().over(over)
    rows = rows.with_columns(again.alias("_again"))
    each = rows.group_by(over, maintain_order=True).agg(pl.col("step", "line", "name").last(), pl.col("_again").any(), held.any().alias("_held"))
    bad = pl.col("_again")
    found = each.filter("_held").group_by(mine, maintain_order=True).agg(
        pl.col("step", "line").first(), (~bad).all().alias("passed"), bad.sum().alias("_n"), pl.len().alias("_of"),
        pl.col("name").sort_by(~bad, maintain_order=True).first(),
    )  # fmt: skip
    # A loss scaler that skips an update throws its gradients away.
    scaled = trace.calls.filter(pl.col("fn") == trace.function_code.get(_SCALED, -1))["proc"].unique()
    found = found.filter(pl.col("passed") | ~pl.col("proc").is_in(scaled.implode()))
    seen = pl.format("{} of {} gradients were cleared after a backward, and given again by the next one", "_n", "_of")
    return _finish(trace, found, "kept", seen)


def _once(trace: Trace) -> pl.DataFrame:
    """One row a backward that is in no other: passed if a model ran forward, with gradients, since the one before it."""
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).sort("proc", "seq")
    # torch.Tensor.backward calls torch.autograd.backward.
    ends = (pl.col("t") + pl.col("dur")).cum_max().shift(1).over("proc")
    backwards = backwards.filter((pl.col("t") >= ends).fill_null(value=True))
    grads = trace.contexts.filter("grad").select("ctx", "recompute").filter(~pl.col("recompute")).select("ctx")
    forwards = trace.calls.filter(_frames.has(int(CallFlag.ROOT)) & ~_frames.has(int(CallFlag.RAISED))).join(grads, on="ctx", how="semi")
    forwards = forwards.select("proc", pl.col("seq").alias("_forward")).sort("_forward")
    rows = backwards.sort("seq").join_asof(
        forwards, left_on="seq", right_on="_forward", by="proc", strategy="backward", check_sortedness=False, coalesce=False
    ).sort("proc", "seq")  # fmt: skip
    before = pl.col("seq").shift(1).over("proc")
    # Of what is behind a step without records nothing is known.
    near = pl.col("step") <= pl.col("step").shift(1).over("proc") + 1
    rows = rows.with_columns((pl.col("_forward") > before).fill_null(value=False).alias("passed"), near.alias("_near")).filter("_near")
    rows = rows.filter((pl.col("step") >= 0) & pl.col("proc").is_in(forwards["proc"].unique().implode()))
    rows = rows.select("proc", pl.col("seq").alias("update"), "step", pl.col("site").alias("line"), "passed", pl.lit("").alias("optimizer"), pl.lit("loss").alias("name"))
    return _finish(trace, rows, "once", pl.lit("a backward follows another, and no model ran in between"))


def _anew(trace: Trace) -> pl.DataFrame:
    """One row an update: passed if a backward has run since the one before it of its optimizer, or runs in it."""
    updates = _frames.updates(trace).drop_nulls("optimizer").sort("proc", "seq")
    searches = _frames.inner_backwards(trace).select("proc", pl.col("update").alias("seq")).unique()
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).select("proc", "seq", pl.col("seq").alias("_backward")).sort("seq")
    mine = ["proc", "optimizer"]
    before, near = pl.col("seq").shift(1).over(mine), pl.col("step") <= pl.col("step").shift(1).over(mine) + 1
    rows = updates.with_columns(before.alias("_before"), near.alias("_near")).join(searches, on=["proc", "seq"], how="anti", maintain_order="left")
    rows = rows.sort("seq").join_asof(backwards, on="seq", by="proc", strategy="backward", check_sortedness=False).sort("proc", "seq").filter("_near")
    rows = rows.with_columns((pl.col("_backward") > pl.col("_before")).fill_null(value=False).alias("passed"), pl.lit("").alias("name"))
    rows = rows.select("proc", pl.col("seq").alias("update"), "step", pl.col("site").alias("line"), "passed", "optimizer", "name")
    return _finish(trace, rows, "anew", pl.lit("an update follows another of the same optimizer, and no backward ran in between"))


def _clipped(trace: Trace) -> pl.DataFrame:
    """One row a step with a backward, of processes that clip or might: passed if something is clipped behind its first backward."""
    backwards = _frames.calls_of(trace, *map(re.escape, _frames.BACKWARDS)).filter(pl.col("step") >= 0)
    rows = backwards.sort("proc", "seq").group_by("proc", "step", maintain_order=True).agg(pl.col("seq", "site").first())
    clips = _frames.calls_of(trace, *map(re.escape, _CLIPS)).group_by("proc", "step").agg(pl.col("seq").max().alias("_clip"))
    rows = rows.join(_frames.whole_steps(trace), on=["proc", "step"], how="semi", maintain_order="left")
    rows = rows.join(clips, on=["proc", "step"], how="left", maintain_order="left").with_columns((pl.col("_clip") > pl.col("seq")).fill_null(value=False).alias("passed"))
    rows = rows.select("proc", pl.col("seq").alias("update"), "step", pl.col("site").alias("line"), "passed", pl.lit("").alias("optimizer"), pl.lit("").alias("name"))
    return _finish(trace, rows, "clipped", pl.lit("no gradient was clipped in this step"))


def _finish(trace: Trace, rows: pl.DataFrame, mode: str, seen: pl.Expr) -> pl.DataFrame:
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    rows = rows.with_columns(pl.when(pl.col("passed") | ~lossy).then("passed").alias("passed"), seen.alias("_seen")).sort("proc", "update")
    rows = rows.filter(pl.int_range(pl.len()).over("proc", "optimizer", "passed", _frames.news(trace)) < _sightings.MANY)
    rows = rows.with_columns(pl.col("update").alias("seq"), pl.col("line").alias("site"))
    return _sightings.example(
        _habits.with_family(trace, rows), mode=mode, what=_WHAT, _expected=pl.lit(_SAYS[mode]), _function=pl.lit(_frames.BACKWARDS[0]),
        _variable=pl.lit("loss") if mode == "once" else pl.lit("") if mode in ("anew", "clipped") else pl.concat_str("name", pl.lit(".grad")),
    )  # fmt: skip
