"""Calls of the training loop occur together and in order, and gradients are cleared between updates.

Catches a forgotten or misplaced zero_grad (stackoverflow 60335387), a step in which DistributedDataParallel was
bypassed, an update that is skipped on one rank, clipping before unscaling, a scheduler that is not stepped. Source:
TrainCheck §3.2 (APISequence). Differs from it: that gradients are cleared is read off the gradients, by whatever
means that happened; windows are optimizer steps; a rule a → b speaks only of runs that use a's owner at all;
and what is a choice of the program (scheduler, clipping, the script's own functions) never leaves its family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Standing, Support
from proctor.invariants.relations import CALLED, Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.sequence.clearing import clearings
from proctor.invariants.relations.sequence.windows import (
    BACKWARD,
    SAMPLER_ITER,
    SET_EPOCH,
    STEP,
    ZERO_GRAD,
    between_passes,
    called,
    circumstances,
    first_calls,
    owners,
    renewals,
    windows,
)
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.calls import (
    cached,
    calls_of,
    features_of,
    open_calls,
    programs_of,
    short,
    table,
)
from proctor.invariants.schema import MODEL_CALL, StateFlag
from proctor.invariants.trace import Trace

_SCALED_STEP = "torch.amp.GradScaler.step"
_ANCHORS = (STEP, BACKWARD, _SCALED_STEP)  # what a step is known by
_OPENING = (
    ZERO_GRAD,
    MODEL_CALL,
    "torch.nn.parallel.DistributedDataParallel.forward",
)  # acts that may begin a step
_MIN_WINDOWS = 3
_ACTS = re.compile(
    r"torch\.(Tensor\.(add_|sub_|mul_|div_|copy_|lerp_|addcmul_|addcdiv_)"
    r"|distributed\.(all_reduce|broadcast|reduce_scatter\w*|all_gather\w*))"
)
_SCHEDULE = "torch.optim.lr_scheduler.LRScheduler.step"
_CLIP, _SCALER = "torch.nn.utils.clip_grad_norm_", "torch.amp.GradScaler."
# Of these the second works on what the first has made, in any program; other orders are habits.
_DEPENDENT = pl.DataFrame(
    [
        (ZERO_GRAD, BACKWARD), (MODEL_CALL, BACKWARD), (BACKWARD, _CLIP), (BACKWARD, STEP), (_CLIP, STEP),
        (_SCALER + "scale", BACKWARD), (BACKWARD, _SCALER + "unscale_"), (BACKWARD, _SCALED_STEP),
        (_SCALER + "unscale_", _CLIP), (_SCALER + "unscale_", _SCALED_STEP), (_CLIP, _SCALED_STEP),
        (_SCALED_STEP, _SCALER + "update"), (STEP, "torch.optim.lr_scheduler.LRScheduler.step"),
    ],
    schema=["a", "b"], orient="row",
)  # fmt: skip
# Not a choice: what clipping, unscaling and schedules are for fixes their place in any loop that has them.
_FIXED = pl.DataFrame(
    [
        (BACKWARD, _CLIP), (_CLIP, STEP), (_CLIP, _SCALED_STEP), (_SCALER + "unscale_", _CLIP),
        (BACKWARD, _SCALER + "unscale_"), (STEP, _SCHEDULE),
    ],
    schema=["a", "b"], orient="row",
)  # fmt: skip
# Choices of a program, so never a rule for another one.
_CHOICE = r"(LRScheduler\.|clip_grad|unscale_|^torch\.distributed\.)"
_SCOPE = ("optimizers", "closure", "scaler", "accumulates", "family")
_FIELDS = ("optimizers", "closure", "scaler", "accumulates", "first", "world", "wrapper", "family")


@register
class CallSequence(Relation):
    """Rules on order: `mode` is cleared, renewed (set_epoch), cover (b needs a in the same step) or lead (a before b)."""

    name: ClassVar[str] = "sequence"
    code: ClassVar[str] = "PR103"
    narrowing: ClassVar[frozenset[str]] = frozenset({"program", "acts"})
    upstream: ClassVar[int] = 4
    reads: ClassVar[Reads] = "records"
    alone: ClassVar[bool] = True
    absence: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        found = (
            [Hypothesis.of(self.name, mode="cleared", attr="grad")]
            if clearings(trace)["passed"].any()
            else []
        )
        if renewals(trace)["passed"].any():
            found.append(Hypothesis.of(self.name, mode="renewed", a=SET_EPOCH, b=SAMPLER_ITER))
        acting = _acting(trace)
        for mode, pairs in (("cover", self._covers(trace)), ("lead", self._leads(trace))):
            for a, b, program in pairs.select("a", "b", "program").unique().iter_rows():
                bound = {"program": program} if program else {}
                if mode == "cover" and a in acting:
                    bound["acts"] = "true"
                found.append(Hypothesis.of(self.name, mode=mode, a=a, b=b, **bound))
        return sorted(found, key=lambda h: h.params)

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        """What acts in one run acts in all."""
        found = {h: h for h in super().settle(survey)}
        acting = [h for h in found if h.get("acts")]
        for h in acting:
            found.pop(Hypothesis.of(h.relation, **{k: v for k, v in h.params if k != "acts"}), None)
        return list(found)

    def _covers(self, trace: Trace) -> pl.DataFrame:
        """a is called in every step of at least one whole run that calls b."""
        firsts, inside = first_calls(trace), windows(trace)
        anchors = firsts.filter(pl.col("token").is_in(_ANCHORS)).join(inside, on=["proc", "step"], how="semi")
        anchors = anchors.select("proc", "step", pl.col("token").alias("b"))
        anchors = anchors.filter(pl.len().over("proc", "b") >= _MIN_WINDOWS)
        others = firsts.filter(~pl.col("token").str.contains(ZERO_GRAD, literal=True))
        both = anchors.join(others.select("proc", "step", pl.col("token").alias("a")), on=["proc", "step"])
        both = (
            both.filter(pl.col("a") != pl.col("b")).group_by("proc", "a", "b").agg(pl.len().alias("together"))
        )
        whole = both.join(anchors.group_by("proc", "b").agg(pl.len().alias("steps")), on=["proc", "b"])
        pairs = whole.filter(pl.col("together") == pl.col("steps"))
        # One anchor is enough: the update, but the backward pass for what the update itself is held against.
        scaled = pl.col("b") == _SCALED_STEP
        nearest = (
            pl.when(pl.col("a") == STEP)
            .then(pl.col("b") == BACKWARD)
            .otherwise(
                pl.when(pl.col("a").str.starts_with("torch.amp.")).then(scaled).otherwise(pl.col("b") == STEP)
            )
        )
        found = _bound(trace, pairs.filter(nearest), free=False)
        # Clipping works on true gradients, so wherever a scaler is used they are unscaled before.
        unscaled = self._unscaled(trace).select("proc", pl.lit(_SCALER + "unscale_").alias("a"), pl.lit(_CLIP).alias("b"))
        return pl.concat([found.select("proc", "a", "b", "program"), unscaled.with_columns(pl.lit("").alias("program"))])

    def _unscaled(self, trace: Trace) -> pl.DataFrame:
        """Processes that unscale in each step in which a scaler is used and gradients are clipped: proc."""
        used = first_calls(trace).join(windows(trace), on=["proc", "step"], how="semi")
        steps = [used.filter(pl.col("token") == t).select("proc", "step") for t in (_CLIP, _SCALER + "scale", _SCALER + "unscale_")]
        both = steps[0].join(steps[1], on=["proc", "step"])
        bad = both.join(steps[2], on=["proc", "step"], how="anti")["proc"].unique()
        return both.group_by("proc").len().filter((pl.col("len") >= _MIN_WINDOWS) & ~pl.col("proc").is_in(bad.implode()))

    def _leads(self, trace: Trace) -> pl.DataFrame:
        """The first a comes before the first b in every step of a process that has both; nearest pairs only."""
        firsts = _ordered(trace).join(windows(trace), on=["proc", "step"], how="semi")
        api = firsts.filter(pl.col("token").str.starts_with("torch.") | (pl.col("token") == MODEL_CALL))
        api = api.select("proc", "step", "token", "seq")
        both = api.join(api, on=["proc", "step"], suffix="_b").filter(pl.col("token") != pl.col("token_b"))
        pairs = (
            both.group_by("proc", pl.col("token").alias("a"), pl.col("token_b").alias("b"))
            .agg((pl.col("seq") < pl.col("seq_b")).all().alias("ordered"), pl.len().alias("steps"))
            .filter(pl.col("ordered") & (pl.col("steps") >= _MIN_WINDOWS))
        )
        # Collectives between backward and update work on gradients, but when they do is the program's choice.
        between = pl.any_horizontal(pl.col("a", "b").is_in([BACKWARD, STEP])) & pl.any_horizontal(
            pl.col("a", "b").str.starts_with("torch.distributed.")
        )
        known = pairs.join(_DEPENDENT, on=["a", "b"], how="semi")
        pairs = pl.concat([known, pairs.filter(between)])
        through = pairs.join(pairs, left_on=["proc", "b"], right_on=["proc", "a"], suffix="_2").select(
            "proc", "a", pl.col("b_2").alias("b")
        )
        return _bound(trace, pairs.join(through.unique(), on=["proc", "a", "b"], how="anti"), free=True)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        wanted = table(hypotheses, "mode", "a", "b", "program")
        columns = ["hyp", "passed", "proc", "step", "seq", "site", "_seen", "_variable"]
        cleared = wanted.filter(pl.col("mode") == "cleared").select("hyp").join(clearings(trace), how="cross")
        frames = [cleared.select(columns).with_columns(state=pl.lit("true"))]
        again = wanted.filter(pl.col("mode") == "renewed").select("hyp").join(renewals(trace), how="cross")
        again = again.with_columns(
            _seen=pl.lit("not called since the pass before"), _variable=pl.lit(None, pl.String)
        )
        frames.append(again.select(columns).with_columns(state=pl.lit("true")))
        for mode in ("cover", "lead"):
            rows = self._pairs(trace, wanted.filter(pl.col("mode") == mode), mode)
            frames.append(rows.select(columns).with_columns(state=pl.lit(None, pl.String)))
        frame = pl.concat(frames).join(circumstances(trace), on=["proc", "step"], how="left")
        # With several optimizers, one may be clipped and the others not.
        clips = [i for i, h in enumerate(hypotheses) if h["mode"] == "cover" and h["a"] == _CLIP]
        frame = frame.filter(~(pl.col("hyp").is_in(clips) & (pl.col("optimizers") == "several")))
        # A clearing for each backward pass hides that the program accumulates.
        updates = [i for i, h in enumerate(hypotheses) if h["mode"] == "cover" and h["a"] == STEP]
        frame = frame.with_columns(pl.when(~pl.col("hyp").is_in(updates)).then("accumulates").alias("accumulates"))
        pairs = [(h.text("a"), h.text("b")) if not h.get("program") else ("", "") for h in hypotheses]
        lawful = [i for i, pair in enumerate(pairs) if pair in set(_FIXED.iter_rows())]
        always = [i for i, pair in enumerate(pairs) if pair == (_SCALER + "unscale_", _CLIP)]
        frame = frame.with_columns(
            pl.when(~pl.col("hyp").is_in(lawful)).then("family").alias("family"),
            *(pl.when(~pl.col("hyp").is_in(always)).then(c).alias(c) for c in _FIELDS if c != "family"),
        )
        # Gradients are cleared and epochs set whatever the program and its circumstances.
        frame = frame.with_columns(pl.when(pl.col("state").is_null()).then(c).alias(c) for c in _FIELDS).drop(
            "state"
        )
        return Examples(frame.sort("hyp", "proc", "seq"), _FIELDS, _SCOPE)

    def _pairs(self, trace: Trace, wanted: pl.DataFrame, mode: str) -> pl.DataFrame:
        firsts = first_calls(trace)
        inside = windows(trace)
        b = wanted.join(firsts.rename({"token": "b", "seq": "seq_b", "site": "site_b"}), on="b").join(
            inside, on=["proc", "step"]
        )
        b = b.join(programs_of(trace).select("proc", pl.col("program").alias("own")), on="proc").filter(
            (pl.col("program") == "") | (pl.col("program") == pl.col("own"))
        )
        # Where nobody uses a's class, a is not missing.
        b = b.join(trace.procs.select("proc", "run"), on="proc").join(
            owners(trace, wanted["a"]), on=["run", "a"], how="semi"
        )
        a = called(trace, wanted["a"]).rename({"token": "a", "seq": "seq_a", "site": "site_a"}).select("proc", "step", "a", "seq_a", "site_a")
        rows = b.join(a, on=["proc", "step", "a"], how="left")
        if mode == "lead":
            rows = rows.filter(pl.col("seq_a").is_not_null())
            place = _ordered(trace).filter(pl.col("token") == ZERO_GRAD).select("proc", "step", pl.col("token").alias("a"), pl.col("seq").alias("_place"))
            rows = rows.join(place, on=["proc", "step", "a"], how="left").with_columns(pl.coalesce("_place", "seq_a").alias("seq_a"))
            # A schedule that moves on after the gradients were cleared belongs to the update before.
            back = firsts.filter(pl.col("token") == BACKWARD).select("proc", "step", pl.col("seq").alias("seq_back"))
            rows = rows.join(back, on=["proc", "step"], how="left")
            early = (pl.col("b") == _SCHEDULE) & (pl.col("seq_b") < pl.col("seq_back").fill_null(0))
            rows = rows.filter(~early).join(between_passes(trace, rows.filter(pl.col("b") == _SCHEDULE)), on=["proc", "step", "seq_a", "seq_b"], how="anti")
            passed, seen = pl.col("seq_a") < pl.col("seq_b"), pl.format("{} ran first", "b")
        else:
            # With a loss scaler an update is skipped on overflow, by design.
            rows = rows.filter(~((pl.col("a") == STEP) & pl.col("scaled")))
            cleared = _clearing_after(firsts)
            rows = rows.join(cleared, on=["proc", "step"], how="left")
            lost = (pl.col("a") == STEP) & pl.col("cleared").fill_null(value=False)
            after = pl.when(lost).then(pl.lit(f", and {ZERO_GRAD} cleared its gradients")).otherwise(pl.lit(""))
            passed, seen = pl.col("seq_a").is_not_null(), pl.format("{} ran without it{}", "b", after)
        rows = rows.join(_probes(trace), on=["proc", "step"], how="left")
        known = pl.col("whole") & (pl.col("opened") | ~pl.col("a").is_in(_OPENING))
        known &= (pl.col("a") != STEP) | pl.col("probe").is_null()
        # Gradients that came by other means (autograd.grad, by hand) need no backward.
        given = _frames.used_gradients(trace).filter(~_frames.has(int(StateFlag.ZERO))).select("proc", "step", given=pl.lit(value=True)).unique()
        rows = rows.join(given, on=["proc", "step"], how="left")
        if mode != "lead":
            known &= (pl.col("a") != BACKWARD) | pl.col("given").is_null()
            # A function of the program that had not returned when the records ended has no row.
            rows = rows.join(open_calls(trace).with_columns(_open=pl.lit(value=True)), on=["proc", "step"], how="left")
            known &= pl.col("_open").is_null() | pl.col("a").str.starts_with("torch.") | (pl.col("a") == MODEL_CALL)
        return rows.with_columns(
            pl.when(passed | known).then(passed).alias("passed"),
            pl.col("seq_b").alias("seq"),
            pl.col("site_b").alias("site"),
            seen.alias("_seen"),
            pl.lit(None, pl.String).alias("_variable"),
        )

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        """What the script or a library calls by itself in each step may be a habit of one run."""
        a = hypothesis.text("a")
        acts = hypothesis.get("acts") == "true"
        return hypothesis["mode"] != "cover" or a.startswith(("torch.", "<")) or acts or support.runs > 1

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """What was used is cleared before it is added to. In which order else a program does things, and what it leaves out
        in some steps, is up to it; where clipping or a schedule stands is seldom meant otherwise."""
        if hypothesis["mode"] == "cleared":
            return Standing.CONTRADICTION
        placed = hypothesis["mode"] == "lead" and not {hypothesis["a"], hypothesis["b"]}.isdisjoint((_CLIP, _SCHEDULE))
        return Standing.CHOICE if placed or hypothesis["mode"] == "renewed" else Standing.HABIT

    def upstream_of(self, hypothesis: Hypothesis) -> int:
        return CALLED if self.standing_of(hypothesis) is Standing.HABIT else self.upstream

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["mode"] == "cleared":
            return Needs(functions=frozenset({STEP, ZERO_GRAD, BACKWARD}), states=frozenset({"grad"}))
        a, b = hypothesis.text("a"), hypothesis.text("b")
        return Needs(functions=frozenset({a, b, STEP, BACKWARD if b == _SCHEDULE else STEP}))

    def say(self, hypothesis: Hypothesis) -> str:
        a, b = hypothesis.text("a"), hypothesis.text("b")
        match hypothesis["mode"]:
            case "cleared":
                return "the gradient of every trained parameter is cleared between two updates"
            case "renewed":
                return f"{a} is called between two passes over a shuffling sampler"
            case "cover":
                return f"every training step that calls {b} also calls {a}"
        return f"in a training step, {a} comes before {b}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        a, b, step = hypothesis.text("a"), hypothesis.text("b"), example.get("step")
        match hypothesis["mode"]:
            case "cleared":
                return Detail(
                    expected="torch.optim.Optimizer.zero_grad, or any other clearing, between two updates",
                    seen=f"Parameter.grad of {example.get('_variable')} goes from one non-zero value to another: it"
                    f" accumulates over steps ({example.get('_seen')})",
                    function=ZERO_GRAD,
                    variable=f"{example.get('_variable')} grad",
                    advice="call optimizer.zero_grad() before backward in each iteration, on the optimizer (or model)"
                    " that holds these parameters",
                )
            case "renewed":
                expected, seen = (
                    f"{a} before each epoch",
                    f"{a} {example.get('_seen')}: this epoch repeats the last order",
                )
                advice = "call sampler.set_epoch(epoch) before each pass over the data"
            case "cover":
                expected, seen = (
                    f"{a} in every step with {b}",
                    f"{a} not called in step {step}: {example.get('_seen')}",
                )
                advice = f"find the branch of the training loop that goes around {short(a)}"
            case _:
                expected, seen = f"{a} before {b}", f"{example.get('_seen')} in step {step}"
                advice = f"look at the order of {short(a)} and {short(b)} in the training loop"
        return Detail(expected=expected, seen=seen, function=a, advice=advice)


def _acting(trace: Trace) -> set[str]:
    """Functions of the user that write to tensors in place, or communicate: what they do is part of training.

    So is what works without gradients and runs no model: it is no evaluation.
    """
    calls = calls_of(trace).filter(pl.col("pfn") != 0)
    by_name = {name: code for code, name in enumerate(trace.functions)}
    acts = [code for name, code in by_name.items() if _ACTS.fullmatch(name)]
    forwards = [code for name, code in by_name.items() if name.endswith(".forward")]
    running = calls.filter(pl.col("fn").is_in(forwards))["pfn"].unique()
    quiet = calls.filter((pl.col("fn") == by_name.get("torch.no_grad.__enter__", -1)) & ~pl.col("pfn").is_in(running.implode()))
    inner = pl.concat([calls.filter(pl.col("fn").is_in(acts))["pfn"], quiet["pfn"]])
    return {trace.functions[code] for code in inner.unique().to_list()}


def _probes(trace: Trace) -> pl.DataFrame:
    """Steps whose backward pass may be for something else than an update: proc, step, probe.

    It attacks an input that requires gradients, or the parameters change without an update (sharpness-aware steps).
    """

    def build() -> pl.DataFrame:
        wants = features_of(trace).filter(pl.col("name").str.contains(r"^([1-9]|[a-z]).*\.requires_grad$") & (pl.col("value") == "true"))
        inputs = calls_of(trace).filter("root").join(wants.select(pl.col("code").alias("args")).unique(), on="args", how="semi")
        own = _frames.data_by_step(trace).filter("changed").select("proc", "step").unique()
        own = own.join(_frames.updates(trace).select("proc", "step").unique(), on=["proc", "step"], how="anti")
        return pl.concat([inputs.select("proc", "step"), own]).unique().with_columns(probe=pl.lit(value=True))

    return cached(trace, "probes", build)


def _ordered(trace: Trace) -> pl.DataFrame:
    """First calls for rules on order: a clearing is out of order only between a backward and the update that should use it.

    Any other clears for what follows, in whichever step it is counted: at the end of a loop's body or at the beginning. With several
    optimizers it may be another's, and after a backward that is not for an update it is due.
    """

    def build() -> pl.DataFrame:
        firsts = first_calls(trace)
        at = [firsts.filter(pl.col("token") == t).select("proc", "step", pl.col("seq").alias(n)) for t, n in ((BACKWARD, "_b"), (STEP, "_u"))]
        found = firsts.join(at[0], on=["proc", "step"], how="left").join(at[1], on=["proc", "step"], how="left")
        found = found.join(circumstances(trace).select("proc", "step", "optimizers"), on=["proc", "step"], how="left")
        found = found.join(_probes(trace), on=["proc", "step"], how="left")
        between = (pl.col("seq") > pl.col("_b")) & (pl.col("seq") < pl.col("_u"))
        between &= (pl.col("optimizers") != "several") & pl.col("probe").is_null()
        early = (pl.col("token") == ZERO_GRAD) & ~between.fill_null(value=False)
        return found.select("proc", "step", "token", pl.when(early).then(0).otherwise("seq").cast(pl.UInt32).alias("seq"), "site")

    return cached(trace, "ordered_calls", build)


def _clearing_after(firsts: pl.DataFrame) -> pl.DataFrame:
    """Steps whose gradients were cleared after their backward, in the same step or as the first act of the next one: proc, step, cleared."""
    clears = firsts.filter(pl.col("token") == ZERO_GRAD).select("proc", "step", pl.col("seq").alias("_clear"))
    back = firsts.filter(pl.col("token") == BACKWARD).select("proc", "step", "seq")
    same = clears.join(back, on=["proc", "step"]).filter(pl.col("_clear") > pl.col("seq")).select("proc", "step")
    return pl.concat([same, clears.select("proc", pl.col("step") - 1)]).unique().with_columns(cleared=pl.lit(value=True))


def _bound(trace: Trace, pairs: pl.DataFrame, *, free: bool) -> pl.DataFrame:
    """Add the program to pairs that are a choice of it; `free`: those with a fixed order are none."""
    choice = pl.any_horizontal(pl.col("a", "b").str.contains(_CHOICE)) | ~(
        pl.col("a").str.starts_with("torch.") | (pl.col("a") == MODEL_CALL)
    )
    own = programs_of(trace).select("proc", pl.col("program").alias("own"))
    fixed = _FIXED.with_columns(pl.lit(value=True).alias("fixed"))
    return pairs.join(own, on="proc").join(fixed, on=["a", "b"], how="left").with_columns(
        pl.when(choice & (pl.col("fixed").is_null() | (not free))).then("own").otherwise(pl.lit("")).alias("program")
    )
