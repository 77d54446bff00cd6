"""A training step goes its course: what an update, a clipping, a scheduler, a mode and a parameter group are for is what they do.

`fed`: an optimizer that steps for the second time has been given a gradient, or moves something. `again`: one gradient is applied
once. `clips`: a clipping between two updates comes behind a backward. `shrinks`: what was clipped to a norm has no greater one.
`successive`: a scheduler does not step twice with nothing in between. `evaluates`: `eval()` puts a model into evaluation mode.
`resumes`: a model that began to train with dropout trains with it after an evaluation. `masks`: no dropout begins at a seed that it
began at in an earlier step. `batch`: a loader does not give a batch twice in a row. `reversed`: norms and biases have no more weight decay than all
matrices. `aligned`: targets lie in the order of the samples that they came with. `consumes`: who is given new batches by a shuffling loader does not train on one
again and again. `rounds`: a layer that is given the digits of float32 gives them.

Others are choices, which a right program seldom makes: `restored`: who sets a model to train after an evaluation has taken it out of training (some measure on the data they train on, as it is trained). `advances`: what a shuffling loader gives is trained on. `examined`: a model that drops out
is set to evaluate for batches that it does not train on. `scheduled`: a scheduler has stepped by the second pass over the data. `steered`: two schedulers of a kind do not step one optimizer where another one has none. `parted`: groups that part
norms and biases from matrices differ in an option; a configuration may make them alike. `halved`: a layer does not train its bias alone, where the others
train both. Of these two and of `rebuilt`, too few healthy programs have what they speak of. `used`: an optimizer whose gradients are made and cleared steps some time. `scored`: a loss
that normalises scores is given no probabilities, one that wants log-probabilities gets such. `digits`: what layers are given and give has the digits of its type,
where nothing computes in a half type on purpose. `reaches`: what a clipping changed is applied by one of the updates before the next backward. `leftover`: an optimizer does not apply what the backward for another one left behind. `averaged`: what is
written between updates does more than to round. `rebuilt`: who loads an optimizer, builds a scheduler and loads that, goes on with the rate that was loaded.

They hold of any program, so they ship. What makes a failure sure is taken from the run itself: the update that moves nothing, the fingerprint that is the same,
the training forwards before the evaluation. Where the run does not tell, there is no example. Each update passes those modes that it does not
contradict, so that the rules are learned from any program.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.argument.model_modes import MODE_SETTERS
from proctor.invariants.relations.argument.tables import DROPOUTS
from proctor.invariants.relations.course import averaging as _averaging
from proctor.invariants.relations.course import choices as _choices
from proctor.invariants.relations.course import clipping as _clipping
from proctor.invariants.relations.course import groups as _groups
from proctor.invariants.relations.course import judged as _judged
from proctor.invariants.relations.course import leftover as _leftover
from proctor.invariants.relations.course import loading as _loading
from proctor.invariants.relations.course import modes as _modes
from proctor.invariants.relations.course import resting as _resting
from proctor.invariants.relations.course import resuming as _resuming
from proctor.invariants.relations.course import updating as _updating
from proctor.invariants.relations.fresh import batches as _batches
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

_PARTS: Final = {
    "fed": _updating.fed, "again": _updating.again, "successive": _updating.successive, "clips": _clipping.clips, "shrinks": _clipping.shrinks, "reaches": _clipping.reaches,
    "evaluates": _modes.evaluates, "resumes": _modes.resumes, "masks": _modes.masks, "batch": _loading.batch,
    "reversed": _groups.reversed_decay, "parted": _groups.parted, "halved": _groups.halved,
    "rebuilt": _resuming.rebuilt, "advances": _choices.advances, "examined": _choices.examined, "scheduled": _choices.scheduled, "steered": _choices.steered,
    "aligned": _judged.aligned, "scored": _judged.scored, "digits": _judged.digits, "used": _resting.used,
    "consumes": _loading.consumes, "rounds": _judged.rounds, "leftover": _leftover.leftover,
    "averaged": _averaging.averaged,
    "restored": lambda trace: _modes.restored(trace, _choices.evaluations(trace)),
}  # fmt: skip
_UPDATES: Final = frozenset({_frames.UPDATE, *_frames.BACKWARDS})
_SAYS: Final = {
    "fed": "an optimizer that steps again and again has a gradient to apply",
    "again": "an update does not apply the gradient of the update before once more",
    "successive": "a scheduler does not step twice with nothing in between",
    "clips": "what is clipped between two updates is clipped behind a backward",
    "shrinks": "gradients that were clipped to a norm have no greater one",
    "reaches": "an update applies what a clipping before it has changed",
    "evaluates": "eval() puts a model into evaluation mode",
    "resumes": "a model that trains with dropout or batch statistics does so after an evaluation, too",
    "masks": "a dropout of training draws another mask in each step",
    "batch": "a loader whose batches differ does not give one twice in a row",
    "reversed": "norms and biases have no more weight decay than the matrices of their optimizer",
    "rebuilt": "a scheduler that is built behind a load and loaded itself leaves the loaded learning rate as it is",
    "parted": "groups that part norms and biases from the matrices of an optimizer differ in an option",
    "halved": "a layer whose bias trains has a weight that trains, as other layers have",
    "advances": "a step trains on another batch than the one before when a shuffling loader has given one since",
    "examined": "a model with dropout or batch statistics is in evaluation mode for batches that it does not train on",
    "scheduled": "a scheduler has stepped by the second pass over the data",
    "steered": "two schedulers of a kind do not step one optimizer where another one, of its class, has none",
    "aligned": "the targets of a loss lie in the order of the samples that they came with",
    "scored": "cross_entropy is given no probabilities, and nll_loss is given log-probabilities",
    "digits": "what layers are given and give has the digits of its type",
    "used": "an optimizer whose gradients are made and cleared again and again steps some time",
    "consumes": "a loop that a shuffling loader gives new batches does not train on one of them again and again",
    "restored": "a model that drops out or normalises by batches, and is set to train after an evaluation, evaluates in evaluation mode",
    "rounds": "a layer that is given the digits of float32 gives them",
    "leftover": "gradients of a backward for other optimizers are cleared before the backward for this one",
    "averaged": "what is written to parameters between updates changes them by more than rounding",
}
_ADVICE: Final = {
    "fed": "Look for a backward that is missing or comes behind the update, a detach or no_grad before the loss, and a clearing in between.",
    "again": "Look for a second optimizer.step: its own, or one in a library that was given the optimizer.",
    "successive": "Look for a second scheduler.step: its own, or one in a library that was given the scheduler.",
    "clips": "Put the clipping between backward and optimizer.step; elsewhere it clips gradients that were applied, or none.",
    "shrinks": "Look at what was given to the clipping: copies, other parameters, or a function that only computes the norm.",
    "reaches": "Look at whose parameters the clipping is given: those of the optimizer that steps next are not.",
    "evaluates": "Look for a module that overrides train(), and for what sets `training` behind it.",
    "resumes": "Call model.train() again after the evaluation.",
    "masks": "Seed once, before the training.",
    "batch": "Look at what hands out batches: an index that does not advance, or workers that each give all.",
    "reversed": "Look at how the parameter groups are made: their options are swapped.",
    "rebuilt": "Build the scheduler first and load the optimizer's state last: a new scheduler sets the rate of its optimizer.",
    "halved": "Look for requires_grad=False: freeze the whole layer, or none of it.",
    "advances": "Look at what the loop does with the batch that it is given.",
    "examined": "Call model.eval() before an evaluation, and model.train() behind it.",
    "scheduled": "Look for the call of scheduler.step, once an epoch or an update.",
    "steered": "Look at which optimizer the second scheduler is made for.",
    "aligned": "Look at what is done with the targets, and not with the samples, between the loader and the loss: a roll, a shuffle, a sort.",
    "scored": "Give cross_entropy the scores as they are; a softmax before it is one too many. nll_loss wants log_softmax.",
    "digits": "Look for a cast between the layers: half(), bfloat16(), to(dtype) and back.",
    "used": "Look for the call of optimizer.step that is missing, or for the optimizer that is built and not needed.",
    "consumes": "Look at what the loop does with the batch that it is given: one that is kept from before the loop, or from the first pass.",
    "restored": "Call model.eval() before the evaluation.",
    "rounds": "Look for what computes this layer in a half type: a cast inside of it, a kernel that was put in its place.",
    "leftover": "Clear the gradients before the backward: this optimizer's zero_grad ran before another part's backward filled them again.",
    "averaged": "Look at what the model is averaged with: `average = model` makes no copy, copy.deepcopy(model) does.",
    "parted": "Give the group of norms and biases a weight decay of 0, or make one group.",
}
_NEEDS: Final = {
    "fed": Needs(_UPDATES, frozenset({"grad", "data"})),
    "again": Needs(_UPDATES, frozenset({"grad", "data"})),
    "successive": Needs(_UPDATES | {_updating.SCHEDULE, _updating.MADE, MODEL_CALL, *_updating.RESETS}),
    "clips": Needs(_UPDATES | {_clipping.CLIP}),
    "shrinks": Needs(_UPDATES | {_clipping.CLIP}, frozenset({"grad"}), frozenset({"clipped"})),
    "evaluates": Needs(MODE_SETTERS | {_frames.UPDATE}),
    "resumes": Needs(_UPDATES | {MODEL_CALL, _modes.NORMALISES, *MODE_SETTERS, *DROPOUTS}, frozenset({"data"})),
    "masks": Needs(_UPDATES | {MODEL_CALL, _modes.SEED, _sightings.CREATED, *DROPOUTS}),
    "batch": Needs(_UPDATES | {MODEL_CALL} | _batches.LOOP, values=frozenset({"batch"})),
    "reversed": Needs(frozenset({_frames.UPDATE}), frozenset({"data"}), frozenset({"option"})),
    "aligned": Needs(_judged.NEEDS["aligned"][0] | {_frames.UPDATE}, values=_judged.NEEDS["aligned"][1]),
    "consumes": Needs(_UPDATES | {MODEL_CALL} | _batches.LOOP | {*_batches.DRAWS}, values=frozenset({"batch", "handed"})),
    "rounds": Needs(_judged.NEEDS["rounds"][0] | {_frames.UPDATE}, values=_judged.NEEDS["rounds"][1]),
}
_CHOICES: Final = {
    "reaches": Needs(_UPDATES | {_clipping.CLIP}, frozenset({"grad"})),
    "restored": Needs(_UPDATES | {MODEL_CALL, _modes.NORMALISES, *MODE_SETTERS, *DROPOUTS} | _batches.LOOP),
    "advances": Needs(_UPDATES | {MODEL_CALL} | _batches.LOOP | {*_batches.DRAWS}, values=frozenset({"batch", "handed"})),
    "examined": Needs(_UPDATES | {MODEL_CALL, _modes.NORMALISES, *MODE_SETTERS, *DROPOUTS} | _batches.LOOP),
    "scheduled": Needs(_UPDATES | {_updating.SCHEDULE} | _batches.LOOP),
    "steered": Needs(_UPDATES | {_updating.SCHEDULE, _updating.MADE}),
    "averaged": Needs(_UPDATES | {MODEL_CALL}, frozenset({"data"})),
    "parted": Needs(frozenset({_frames.UPDATE}), frozenset({"data"}), frozenset({"option"})),
    "halved": Needs(frozenset({_frames.UPDATE}), frozenset({"data"})),
    "scored": Needs(_judged.NEEDS["scored"][0] | {_frames.UPDATE}, values=_judged.NEEDS["scored"][1]),
    "digits": Needs(_judged.NEEDS["digits"][0] | {_frames.UPDATE}, values=_judged.NEEDS["digits"][1]),
    "used": Needs(_UPDATES | {"torch.optim.Optimizer.zero_grad", _sightings.CREATED}, frozenset({"grad", "data"})),
    "leftover": Needs(_UPDATES | {"torch.Tensor.zero_", "torch.Tensor.fill_"}, frozenset({"grad"})),
    "rebuilt": Needs(
        frozenset({_frames.UPDATE, _updating.MADE, _updating.SCHEDULE, _resuming.OPTIMIZER_GIVEN, _resuming.SCHEDULER_GIVEN}), values=frozenset({"option"})
    ),
}
_SIGNATURES: Final = {
    "clips": ((_clipping.CLIP, ""),), "shrinks": ((_clipping.CLIP, ""),), "reaches": ((_clipping.CLIP, ""),),
    "masks": ((_modes.SEED, ""), *((name, "") for name in sorted(DROPOUTS))),
    "resumes": ((MODEL_CALL, "0.training"), *((name, "") for name in sorted(DROPOUTS))),
}  # fmt: skip


@register
class Course(Relation):
    """What makes up a step does what it is for."""

    name = "course"
    code = "PR123"
    standing: ClassVar[Standing] = Standing.LAW
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 1
    reach: ClassVar[int | None] = 1
    alone: ClassVar[bool] = True
    absence: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        held = _every(trace, set(_PARTS)).filter("passed")["mode"].unique().sort()
        return [Hypothesis.of(self.name, mode=mode, what=_updating.WHAT) for mode in held]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _sightings.bound_examples(trace, _every(trace, {h.text("mode") for h in hypotheses}), hypotheses)

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        mode = hypothesis["mode"]
        return "calls" if mode in ("clips", "successive", "evaluates", "resumes", "restored", "examined", "scheduled", "steered") else "records" if mode in ("fed", "again", "used", "leftover", "reaches") else "draws" if mode in ("advances", "batch", "consumes") else "numbers"

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """What a program may do on purpose, though seldom, is a choice."""
        return Standing.CHOICE if hypothesis["mode"] in _CHOICES else self.standing

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        return frozenset(_SIGNATURES.get(hypothesis.text("mode"), ()))

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return (_NEEDS | _CHOICES)[hypothesis.text("mode")]

    def say(self, hypothesis: Hypothesis) -> str:
        return _SAYS[hypothesis.text("mode")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode = hypothesis.text("mode")
        return Detail(
            expected=_SAYS[mode], seen=example["_seen"] or "", function=example["_function"] or "", variable=example["_variable"] or "", advice=_ADVICE[mode]
        )


def _every(trace: Trace, modes: set[str]) -> pl.DataFrame:
    return _sightings.of_parts(trace, "course", {mode: _PARTS[mode] for mode in sorted(modes)})
