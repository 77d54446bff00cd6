"""Parameters move when they should and by what they should: by the optimizer, and not when they are frozen.

`mode="between"`: what an optimizer holds has, when it steps, the value that its last step left; only the optimizer and a
load move it. Catches averaged weights that are swapped in for an evaluation and not swapped back, a re-initialisation in
the loop, an edit in place. To move parameters otherwise (clipping of weights, local SGD) is a choice of the program, so
that the rule is of one family of programs for good.
`mode="evaluation"`: the same across evaluations alone, of any program that does not write parameters at other times.
`mode="frozen"`: a parameter with requires_grad=False stays as it is when its optimizer steps. Catches weight decay and
momentum that go on moving what was frozen in mid-training.
`mode="trains"`: every parameter of the model has moved after its first two updates (`_moving`), but for those that did not in the
learned runs; of one family of programs, whatever the depth. Catches a layer that was frozen, detached, or left out of the optimizer.
`mode="learns"`: a model that has moved by the end of the third step in the learned runs does so; of one family. Catches a whole model that no optimizer is given.
`mode="remembers"`: a running average of an optimizer is no fixed share of the last gradient (`_remembering`), of any program. Catches a state
that is cleared or made anew before each update.
`mode="counted"`: no backward doubles the gradients that the one before it left, of any program. Catches a loss that is propagated twice.
`mode="doubled"`: the same where no model ran in between, so that it cannot be one batch that is given twice on purpose.
`mode="undone"`: the updates of an optimizer are not all taken back before its next one (`_undoing`), of any program.
`mode="vanished"`: the learning rate does not fall so far that updates are rounded away (`_vanishing`), of any program.

Source: ours. `contain` (PR102) says that what should move moves, of any program; the first two say that what should not does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import (
    Detail,
    Examples,
    Needs,
    Relation,
    _surveys,
    register,
)
from proctor.invariants.relations.progress import moving as _moving
from proctor.invariants.relations.progress import remembering as _remembering
from proctor.invariants.relations.progress import undone as _undoing
from proctor.invariants.relations.progress import vanished as _vanishing
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL, StateFlag
from proctor.invariants.trace import Trace

_FIELDS: Final = ("module", "kind", "position", "wrapper", "phase", "family")
_SCOPE: Final = ("wrapper",)
_KEEP: Final = 4  # passing examples of one parameter in one process
_KEEP_FAILING: Final = 64
_ROUNDING: Final = 1e-6  # of a norm: averaged weights that are interpolated in and out again come back so far off
# Calls that are meant to set parameters: what they leave is no edit.
_SETS: Final = (
    r"torch\.nn\.Module\.(load_state_dict|to|half|float|double|bfloat16|cuda|cpu)", r"torch\.load", r"torch\.nn\.init\..*",
    r"torch\.nn\.parallel\.DistributedDataParallel\.__init__", r"torch\.nn\.utils\.vector_to_parameters",
)  # fmt: skip


@register
class Progress(Relation):
    """Only what should move a parameter moves it."""

    name = "progress"
    code = "PR111"
    reads_signatures: ClassVar[bool] = False
    upstream: ClassVar[int] = 3
    ahead: ClassVar[int] = 0
    reach: ClassVar[int | None] = 1

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        # A family in which some parameter is moved otherwise does so by choice.
        between = _between(trace).group_by("family").agg(pl.col("passed").all())
        moved = {Hypothesis.of("progress", mode="between", family=family): kept for family, kept in between.iter_rows()}
        general = [Hypothesis.of("progress", mode=mode) for mode, view in _GENERAL.items() if view(trace)["passed"].any()]
        broken = [h for h, kept in moved.items() if not kept]
        trains = [Hypothesis.of("progress", mode="trains", family=family, but=but) for family, but in _moving.exceptions(trace)]
        trains += [Hypothesis.of("progress", mode="learns", family=family, what=what) for family, what in _moving.learning(trace)]
        return _surveys.of_hypotheses([*moved, *general, *trains], broken)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        parts = []
        families = [(i, h.text("family")) for i, h in enumerate(hypotheses) if h["mode"] == "between"]
        if families:
            index = pl.DataFrame(families, schema={"hyp": pl.UInt32, "family": pl.String}, orient="row")
            parts.append(_between(trace).join(index, on="family"))
        for i, h in enumerate(hypotheses):
            if h["mode"] in ("trains", "learns"):
                mine = ~pl.col("what").is_in(h.text("but").split()) if h["mode"] == "trains" else pl.col("what") == h.text("what")
                rows = (_moving.moved if h["mode"] == "trains" else _moving.models)(trace).filter((pl.col("family") == h.text("family")) & mine)
                parts.append(_finish(trace, rows).with_columns(pl.lit(i, dtype=pl.UInt32).alias("hyp")))
            if h["mode"] in _GENERAL:
                parts.append(_GENERAL[h.text("mode")](trace).with_columns(pl.lit(i, dtype=pl.UInt32).alias("hyp")))
        return Examples(_stack(parts), _FIELDS, _SCOPE)

    def remember(self, trace: Trace, first: int, end: int) -> pl.DataFrame | None:
        return _without_evaluations(trace)

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """An optimizer skips what is frozen. An evaluation may swap averaged weights in."""
        return {"frozen": Standing.LAW, "remembers": Standing.LAW, "doubled": Standing.LAW, "evaluation": Standing.CHOICE, "counted": Standing.CHOICE, "undone": Standing.CHOICE, "vanished": Standing.CHOICE}.get(hypothesis.text("mode"), Standing.HABIT)

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["mode"] == "doubled":
            return Needs(frozenset({_frames.UPDATE, MODEL_CALL, *_frames.BACKWARDS}), frozenset({"grad"}))
        if hypothesis["mode"] in ("remembers", "counted"):
            return Needs(frozenset({_frames.UPDATE, _sightings.CREATED, *_frames.BACKWARDS}), frozenset({"grad", "optimizer"}))
        if hypothesis["mode"] == "vanished":
            return Needs(frozenset({_frames.UPDATE, _vanishing.SCHEDULE, *_frames.BACKWARDS}), frozenset({"data", "grad"}), frozenset({"option"}))
        return Needs(frozenset({_frames.UPDATE, "torch.nn.Module.load_state_dict"}), frozenset({"data"}))

    def say(self, hypothesis: Hypothesis) -> str:
        if hypothesis["mode"] == "frozen":
            return "Optimizer.step leaves parameters alone that are frozen (requires_grad=False)"
        if hypothesis["mode"] == "counted":
            return "no backward doubles the gradients that are there"
        if hypothesis["mode"] == "doubled":
            return "no backward doubles the gradients of the one before it with no forward in between"
        if hypothesis["mode"] == "remembers":
            return "a running average of an optimizer is no fixed share of the last gradient"
        if hypothesis["mode"] == "undone":
            return "what an optimizer changed is not taken back before it steps again, neither update after update nor to the beginning again and again"
        if hypothesis["mode"] == "vanished":
            return "the learning rate of an optimizer does not fall so far that its updates are rounded away"
        if hypothesis["mode"] == "evaluation":
            return "an evaluation leaves the parameters as the optimizer left them"
        where = _habits.of_programs(hypothesis)
        if hypothesis["mode"] == "trains":
            but = f", but for {hypothesis.text('but').replace(' ', ', ')}" if hypothesis.get("but") else ""
            return f"every parameter has moved after two updates of its model{but}{where}"
        if hypothesis["mode"] == "learns":
            return f"{hypothesis['what']} has moved by the end of the third step{where}"
        return f"between two steps of its optimizer a parameter keeps its value{where}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        name, step, size = example["_name"], example["step"], example["_norms"]
        if hypothesis["mode"] == "frozen":
            return Detail(
                expected=f"{name}, which has requires_grad=False, keeps its value through Optimizer.step",
                seen=f"{name} changed in Optimizer.step of step {step} {size}",
                function=_frames.UPDATE,
                variable=name,
                module=example["_module"],
                advice="Weight decay and momentum go on for what is frozen while its gradient is a tensor of zeros: set the gradient to None, or take the parameter out of the optimizer.",
            )
        if hypothesis["mode"] in ("counted", "doubled"):
            return Detail(
                expected="a backward adds another gradient than the one that is there",
                seen=f"the gradient of {name}, and all others, doubled {size}",
                function=_frames.BACKWARDS[0],
                variable=f"{name}.grad",
                module=example["_module"],
                advice="Look for a second backward of the same loss (retain_graph=True), or the same batch given twice to one update.",
            )
        if hypothesis["mode"] == "remembers":
            return Detail(
                expected=f"{name} after step {step} also holds what earlier updates left in it",
                seen=f"it is the same share of the last gradient as after its first update, {size.replace('before', 'of the gradient').replace('after', 'of the state')}",
                function=_frames.UPDATE,
                variable=name,
                advice="Look for what clears optimizer.state, or builds the optimizer anew, between updates.",
            )
        if hypothesis["mode"] == "undone":
            return Detail(
                expected=f"what Optimizer.step of step {step} made of {name} is still there when the optimizer steps again",
                seen=f"{name}, and all that the optimizer moved, {size}",
                function=example["_by"] or _frames.UPDATE,
                variable=name,
                module=example["_module"],
                advice="Look for what writes the parameters after the update: an average copied into the model in place of the other way round, a backup that is restored in each iteration.",
            )
        if hypothesis["mode"] == "vanished":
            return Detail(
                expected=f"Optimizer.step of step {step} moves some of what it holds, such as {name}, which has a gradient",
                seen=f"nothing that the optimizer holds has moved in {size}",
                function=_frames.UPDATE,
                module=example["_module"],
                advice="Look at how often the scheduler is stepped: for each batch where its numbers (step_size, T_max, gamma) count epochs, for each microbatch where they count updates, or by the loop and a library both.",
            )
        if hypothesis["mode"] in ("trains", "learns"):
            whole = hypothesis["mode"] == "learns"
            return Detail(
                expected=f"{hypothesis['what']} moves in the first three steps, as in the learned runs" if whole else f"{name} moves in the first two updates of its model, as in the learned runs",
                seen=f"none of its parameters, such as {name}, has moved by the end of step {step}" if whole else f"{name} has not moved by the end of step {step}",
                function=_frames.UPDATE,
                variable=name,
                module=example["_module"],
                advice="Look for requires_grad=False, a detach or no_grad before it, and whether an optimizer holds it.",
            )
        return Detail(
            expected=f"{name} as Optimizer.step of step {step} left it when the optimizer steps again",
            seen=f"{name} was changed after Optimizer.step of step {step}, and not changed back {size}",
            function=example["_by"] or _frames.UPDATE,
            variable=name,
            module=example["_module"],
            advice="Look for what writes parameters outside the optimizer: averaged weights swapped in and not back, an initialisation in the loop, an edit in place.",
        )


def _rows(trace: Trace) -> pl.DataFrame:
    """Values of parameters that an optimizer updates in this process, in order, with `inside`: seen at the end of an update."""
    return _frames.memo(trace, "progress rows", _find_rows)


def _find_rows(trace: Trace) -> pl.DataFrame:
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    rows = _frames.rows(trace).join(about.select("var", "name", "module", "kind", "position"), on="var", maintain_order="left")
    rows = rows.filter(~_frames.has(int(StateFlag.NONE)))
    rows = rows.join(_frames.metas(trace, "in_optimizer", "optimizer", "requires_grad", "wrapper"), on="meta", how="left", maintain_order="left")
    # What a closure sees while its optimizer searches is no value that an update left.
    rows = rows.join(_frames.inner_backwards(trace).select("proc", "call").unique(), on=["proc", "call"], how="anti", maintain_order="left")
    steps = _frames.updates(trace).select("proc", pl.col("seq").alias("call"), pl.col("site").alias("_site"), pl.lit(value=True).alias("_update"))
    rows = rows.join(steps.unique(["proc", "call"]), on=["proc", "call"], how="left", maintain_order="left")
    lossy = [i for i, p in enumerate(trace.processes) if p.dropped > 0]
    return rows.with_columns(
        (pl.col("_update").fill_null(value=False) & (pl.col("edge") == 1)).alias("inside"),
        pl.col("proc").is_in(lossy).alias("_lossy"),
    )


def _turns(trace: Trace) -> pl.DataFrame:
    """One row a parameter and update that changed it: passed if its value was the same when the next update began.

    What a load or a conversion leaves is no example, nor what comes after the last update.
    """
    return _frames.memo(trace, "progress turns", _find_turns)


def _find_turns(trace: Trace) -> pl.DataFrame:
    rows = _rows(trace)
    sets = _frames.functions_like(trace, _SETS)["fn"].implode()
    setters = trace.calls.filter(pl.col("fn").is_in(sets)).select("proc", pl.col("seq").alias("call"), pl.lit(value=True).alias("_set"))
    rows = rows.join(setters.unique(), on=["proc", "call"], how="left", maintain_order="left")
    mine = ["proc", "var"]
    rows = rows.with_columns(pl.col("inside").cum_sum().over(mine).alias("_turn")).filter((pl.col("_turn") > 0) & (pl.col("step") >= 0))
    groups = rows.filter((pl.col("in_optimizer") == "true").all().over(mine)).group_by(*mine, "_turn", maintain_order=True).agg(
        (pl.col("fp").first() == pl.col("fp").last()).alias("passed"),
        pl.col("_set").any(),
        pl.col("step", "seq", "phase", "name", "module", "kind", "position", "_lossy").first(),
        pl.col("wrapper").last(),
        pl.col("_site").first().alias("site"),
        pl.col("norm").first().alias("_a"),
        pl.col("norm").last().alias("_b"),
        pl.col("call").last().alias("_call"),
        (pl.col("optimizer").n_unique() > 1).alias("_other"),
    )  # fmt: skip
    last = pl.col("_turn") == pl.col("_turn").max().over(mine)
    # Held by another optimizer it is a tensor of the same name, of a model that took the place of the first.
    groups = groups.filter(~pl.col("_set") & ~pl.col("_other") & (pl.col("passed") | ~last))
    calls = trace.calls.select("proc", pl.col("seq").alias("_call"), "fn")
    names = pl.DataFrame({"fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32), "_by": trace.functions})
    calls = calls.join(groups.filter(~pl.col("passed")).select("proc", "_call").unique(), on=["proc", "_call"], how="semi").join(names, on="fn").drop("fn")
    groups = groups.join(calls.unique(["proc", "_call"]), on=["proc", "_call"], how="left", maintain_order="left")
    groups = groups.join(trace.families, on="proc", how="left", maintain_order="left")
    return groups.with_columns(pl.when(pl.col("passed") | ~pl.col("_lossy")).then("passed").alias("passed"))


def _between(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "progress between", lambda t: _finish(t, _turns(t)))


def _evaluated(trace: Trace) -> pl.DataFrame:
    """Turns with an evaluation in them, of processes that write parameters in no other turn."""
    return _frames.memo(trace, "progress evaluated", _find_evaluated)


def _find_evaluated(trace: Trace) -> pl.DataFrame:
    turns, others = _turns_with_evaluations(trace), _without_evaluations(trace)
    # Who writes parameters whenever it likes (clipping, averaging over ranks) writes them for other reasons.
    turns = turns.filter(pl.col("_eval") & ~pl.col("proc").is_in(others.filter("_wrote")["proc"].implode()))
    rounded = ((pl.col("_a") - pl.col("_b")).abs() <= _ROUNDING * pl.col("_a").abs()).fill_null(value=False)
    # Where each turn has an evaluation, who wrote is not known: a decay of the program's own behind the update does so in each.
    told = ~rounded & pl.col("proc").is_in(others["proc"].implode())
    return _finish(trace, turns.with_columns(pl.when(pl.col("passed") | told).then("passed").alias("passed")))


def _turns_with_evaluations(trace: Trace) -> pl.DataFrame:
    """Turns, with `_eval`: there is an evaluation in it."""
    return _frames.memo(trace, "progress turns with evaluations", _find_turns_with_evaluations)


def _find_turns_with_evaluations(trace: Trace) -> pl.DataFrame:
    steps = trace.contexts.filter(pl.col("phase") == "eval").select("proc", "step", pl.lit(value=True).alias("_eval")).unique()
    return _turns(trace).join(steps, on=["proc", "step"], how="left", maintain_order="left").with_columns(pl.col("_eval").fill_null(value=False))


def _without_evaluations(trace: Trace) -> pl.DataFrame:
    """Processes with turns that have no evaluation, in steps that are gone, too: proc, and `_wrote` where parameters were written in one."""
    found = _turns_with_evaluations(trace).filter(~pl.col("_eval")).drop_nulls("passed").select("proc", (~pl.col("passed")).alias("_wrote"))
    past = trace.past.get("progress")
    return (found if past is None else pl.concat([past, found])).group_by("proc", maintain_order=True).agg(pl.col("_wrote").any()).sort("proc")


def _frozen(trace: Trace) -> pl.DataFrame:
    """One row a frozen parameter and update: passed if it did not change; changes of what no optimizer holds are no example."""
    return _frames.memo(trace, "progress frozen", _find_frozen)


def _find_frozen(trace: Trace) -> pl.DataFrame:
    rows = _rows(trace)
    mine = ["proc", "var"]
    frozen = pl.col("requires_grad") == "false"
    held = pl.col("in_optimizer") == "true"
    about = ["name", "module", "kind", "position", "wrapper", "norm"]
    moved = rows.filter(pl.col("inside") & pl.col("fresh") & frozen & held & (pl.col("step") >= 0))
    before = rows.select(*mine, "seq", pl.col("norm").shift(1).over(mine).alias("_a"), "call", "edge").unique([*mine, "seq", "call", "edge"], keep="last")
    moved = moved.join(before, on=[*mine, "seq", "call", "edge"], how="left", maintain_order="left").select(
        *mine, "step", "seq", pl.col("_site").alias("site"), "phase", *about[:-1], "_a", pl.col("norm").alias("_b"), "_lossy",
        pl.lit(value=False).alias("passed"),
    )  # fmt: skip
    # A frozen parameter has no row at an update: the first updates after its last row are its examples.
    last = rows.group_by(mine, maintain_order=True).agg(frozen.last().alias("_still"), pl.col("seq").last().alias("_from"), pl.col(about).last(), pl.col("_lossy").last())
    steps = _frames.updates(trace).filter(pl.col("step") >= 0).select("proc", "step", "seq", "site", "phase")
    still = last.filter("_still").join(steps, on="proc").filter(pl.col("seq") > pl.col("_from"))
    still = _frames.first_of_each(still.sort("seq"), [*mine, _frames.news(trace)], _KEEP)
    still = still.select(
        *mine, "step", "seq", "site", "phase", *about[:-1], pl.col("norm").alias("_a"), pl.col("norm").alias("_b"), "_lossy",
        pl.lit(value=True).alias("passed"),
    )  # fmt: skip
    found = pl.concat([moved, still]).join(trace.families, on="proc", how="left", maintain_order="left")
    return _finish(trace, found)


def _finish(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    ok = pl.col("passed").fill_null(value=True)
    rows = rows.sort("step", "proc", "var", maintain_order=True)
    rows = rows.filter(
        pl.when(ok).then(pl.int_range(pl.len()).over("proc", "var", ok, _frames.news(trace)) < _KEEP)
        .otherwise((~ok).cum_sum().over("proc", _frames.news(trace)) <= _KEEP_FAILING)
    )
    by = pl.col("_by") if "_by" in rows.columns else pl.lit("")
    size = pl.format("(norm {} before, {} after)", pl.col("_a").round(6), pl.col("_b").round(6))
    norms = pl.col("_norms") if "_norms" in rows.columns else size
    return rows.select(
        "passed", "proc", "step", "seq", pl.col("site").fill_null(0), "module", "kind", "position", "wrapper", "phase", "family",
        pl.col("name").alias("_name"), pl.col("module").alias("_module"), by.fill_null("").alias("_by"),
        norms.fill_null("").alias("_norms"),
    )  # fmt: skip


def _remembers(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "progress remembers", lambda t: _finish(t, _remembering.remembered(t)))


def _counted(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "progress counted", lambda t: _finish(t, _remembering.counted(t)))


def _doubled(trace: Trace) -> pl.DataFrame:
    rows = _remembering.counted(trace)
    return _frames.memo(trace, "progress doubled", lambda t: _finish(t, rows.filter(pl.col("passed") | ~pl.col("fed"))))


def _undone(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "progress undone", lambda t: _finish(t, _undoing.undone(t, _rows(t))))


def _vanished(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "progress vanished", lambda t: _finish(t, _vanishing.vanished(t, _rows(t))))


_GENERAL: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    "frozen": _frozen, "evaluation": _evaluated, "remembers": _remembers, "counted": _counted, "doubled": _doubled, "undone": _undone, "vanished": _vanished,
}  # fmt: skip


def _stack(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    types: dict[str, Any] = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}
    columns = {**types, **dict.fromkeys((*_FIELDS, "_name", "_module", "_by", "_norms"), pl.String)}
    even = [part.select(pl.col(c).cast(t) for c, t in columns.items()) for part in parts]
    return pl.concat(even) if even else pl.DataFrame(schema=columns)
