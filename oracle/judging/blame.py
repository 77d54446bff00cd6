"""What is wrong by itself: from a run in which every module was fed the reference's values to one module and one side of it.

The first cause in the order of the dataflow is named: what goes into a module, the module itself, its backward pass, what is done to
gradients after that, the optimizer. Where all gradients, or all updates, are wrong, no single parameter is blamed but what is done to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from proctor.oracle.judging.holders import OWN
from proctor.oracle.judging.scalars import UNCLIPPED, UPDATES
from proctor.oracle.judging.verdicts import (
    ASTRAY,
    COMPARED,
    Culprit,
    TensorVerdict,
    Verdict,
    failing,
    flow,
    follows,
)
from proctor.oracle.merging.assemble import ACTIVATIONS, GRADIENTS, PARTIAL
from proctor.oracle.merging.locate import FITS
from proctor.oracle.tensors import later

DECISIONS: Final = ("choice", "dropout")
FORWARD: Final = ("input", "output", "score", *DECISIONS)
LEAST: Final = 3  # parameters that must be wrong before all of them are blamed at once


Absent = Mapping[tuple[str, str], str]  # place of what a module gets in the reference and not in the candidate, by kind (input, grad_output) and module


def culprit(found: Verdict, alone: Verdict, absent: Absent = MappingProxyType({})) -> Culprit | None:
    """Name what is wrong by itself.

    Args:
        found: end to end.
        alone: with every module fed the reference's values.
        absent: what modules do not get.

    Returns:
        None where nothing is wrong alone, and nothing says where the runs part.
    """
    wrong = sorted((t for t in alone.tensors if failing(t) or (t.verdict == "unmapped" and t.ratio > 1.0 and t.rel_err < FITS)), key=flow)
    own = {(t.step, t.name) for t in found.tensors if t.kind == "main_grad" and t.note == OWN}
    wrong = _believed(found, [t for t in wrong if t.kind != "main_grad" or (t.step, t.name) not in own])
    step = wrong[0].step if wrong else None
    wrong = [t for t in wrong if t.step == step]  # what a later step begins with is wrong already
    taken = [t for t in wrong if t.kind == "main_grad"]
    wrong = [t for t in wrong if t.kind not in ACTIVATIONS or not follows(t, taken)]
    named = next((c for look in _LOOKS if (c := look(found, alone, wrong)) is not None), None)
    named = _not_given(found, named, absent) if named is not None and named.direction in ("forward", "gradient") and not named.decision else named
    begins = found.first
    if begins is None or begins.layout != ASTRAY:
        begins = _hidden(found, alone, named, wrong) or _unplaced(found, begins) or begins
    if begins is None or begins.kind not in ACTIVATIONS or (named is not None and (begins.step != step or follows(begins, taken) or _moved_unseen(found, begins))):
        return named
    if begins.layout == ASTRAY and (named is None or named.direction != "model"):
        return _between(found, begins)
    if named is not None and _off_alone(alone, begins) and begins.name.startswith(f"{named.module}." if named.module else "") and begins.name != named.module:
        return _between(found, begins)  # inside what is named, and wrong whatever it is fed: nobody knows its layout, so it was not named
    earlier = ("forward", "backward", "model") if begins.kind in GRADIENTS else ("forward", "model")
    if named is not None and named.direction in earlier:
        return named
    return _between(found, begins)  # the runs part before anything that is wrong by itself


def _hidden(found: Verdict, alone: Verdict, named: Culprit | None, wrong: Sequence[TensorVerdict]) -> TensorVerdict | None:
    """What makes up no whole, whatever its module is fed, inside the module that is named and before what shows there: on the way to the error."""
    if named is None or named.direction not in ("forward", "backward") or not wrong:
        return None
    kinds, inside = ("input", "output") if named.direction == "forward" else GRADIENTS, f"{named.module}." if named.module else ""
    apart = [t for t in found.tensors if t.verdict == "unmapped" and t.kind in kinds and t.name.startswith(inside) and math.isinf(t.rel_err) and t.layout != ASTRAY]
    return min((t for t in apart if flow(t) < flow(wrong[0]) and _off_alone(alone, t)), key=flow, default=None)


def _believed(found: Verdict, wrong: Sequence[TensorVerdict]) -> list[TensorVerdict]:
    """What is wrong alone, without what is right end to end by more than it is off alone: there the values that were given are at fault."""
    right = {(t.step, t.call, t.kind, t.name, t.slot): t.tolerance for t in found.tensors if t.verdict in ("ok", "warn") and t.kind in (*ACTIVATIONS, "score")}
    kept = [t for t in wrong if not t.rel_err > right.get((t.step, t.call, t.kind, t.name, t.slot), math.inf)]
    return kept or list(wrong)


def _not_given(found: Verdict, named: Culprit, absent: Absent) -> Culprit:
    """Not a module that does not get what the reference's gets, but the outermost around it that does not get it either."""
    if named.direction == "gradient":
        stops = [m for kind, m in absent if kind == "grad_output"]
        if not stops or not any(named.module == m or named.module.startswith(f"{m}.") for m in stops):
            return named
        text = f"no gradient comes back to {stops[0] or 'the model'}, nor to what is before it: it runs without gradients, or its result is detached"
        return Culprit(stops[0], "backward", named.source, text, named.ratio)
    module = named.module
    if ("input", module) not in absent:
        return named
    while module and ("input", outer := around(found, module)) in absent:
        module = outer
    slot = absent["input", module]
    return Culprit(module, "forward", named.source, f"{module or 'the model'} is not given {slot or 'an input'}, which the reference's gets", named.ratio)


Look = Callable[[Verdict, Verdict, Sequence[TensorVerdict]], Culprit | None]


def _parameter(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """A parameter that the candidate has not, or has otherwise from the beginning."""
    first = next((t for v in (alone, found) for t in v.tensors if t.kind == "param" and failing(t)), None)
    if first is None:
        return None
    text = f"the candidate has no parameter {first.name}" if first.verdict == "missing" else f"{first.name}: {first.note}"
    return Culprit(_owner(first.name), "model", first.source, text)


def _module(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """The first module that gives something else than the reference's, forward or backward."""
    for kinds, direction in ((FORWARD, "forward"), (GRADIENTS, "backward")):
        first = next((t for t in wrong if t.kind in kinds), None)
        if first is None:
            continue
        if first.kind in DECISIONS:
            said = f"{first.name or 'the model'}{' chooses otherwise' if first.kind == 'choice' else ''}: {first.note}"
            return Culprit(first.name, direction, first.source, said, first.ratio, decision=first.kind)
        inside = first.kind in ("output", "grad_input", "score")
        module = first.name if inside else around(alone, first.name)
        what = "gives another result" if direction == "forward" else "gives another gradient of its input"
        if not inside:
            side = "into" if direction == "forward" else "back out of"
            what = f"what goes {side} {first.name or 'the model'} is wrong, and {first.name or 'the model'} itself is not the cause"
        elif direction == "backward" and later(first.slot):
            text = f"when gradients come back past {first.name or 'the model'} again, they are not the reference's: what is computed of gradients (a penalty), or a second loss"
            return Culprit("", direction, first.source, text, first.ratio)
        if direction == "forward" and first.kind == "output" and _moved_unseen(alone, first):
            text = f"{module or 'the model'} gives the reference's result until gradients came back past it, and another one afterwards: what is made of them, and given to it as its parameters, is wrong"
            return Culprit("", "update", first.source, text, first.ratio)
        partial = _partial_before(alone, first, "output" if direction == "forward" else "grad_input")
        if partial is not None:
            text = f"its ranks hold partial sums that nothing puts together before {module or 'the model'} uses them: an all-reduce is missing"
            return Culprit(partial.name, direction, partial.source, f"{partial.name}: {text}", first.ratio)
        return Culprit(module, direction, _source(found, alone, module) or first.source, f"fed with the reference's values, {module or 'the model'}: {what}", first.ratio)
    return None


def _moved_unseen(alone: Verdict, first: TensorVerdict) -> bool:
    """Whether a module is right until gradients came back past it, in a step of which nobody saw an update (a program that makes new parameters by hand)."""
    held = [t for t in alone.tensors if t.step == first.step]
    if any(t.kind == "main_grad" for t in held):
        return False
    own = [t for t in held if t.name == first.name]
    before = [t for t in own if (t.kind, t.slot) == (first.kind, first.slot) and t.call < first.call]
    back = [t for t in own if t.kind == "grad_output" and t.order < first.order]
    return bool(before and back) and all(t.verdict in ("ok", "warn") for t in (*before, *back))


def _buffer(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    first = next((t for t in wrong if t.kind == "buffer_after"), None)
    if first is None:
        return None
    text = f"the buffer {first.name} is not the reference's after the step: {first.note or 'it is computed otherwise'}"
    return Culprit(_owner(first.name), "forward", first.source, text, first.ratio)


def _gradient(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """What is done to gradients of parameters after the backward pass."""
    first = next((t for t in wrong if t.kind == "main_grad"), None)
    if first is None:
        return None
    right = "forward and backward of every module are right; "
    clipping = next((t for t in _told(found, alone) if t.name in ("clip_coefficient", "grad_norm")), None)
    if first.slot != UNCLIPPED and clipping is not None:
        return Culprit("", "gradient", "", f"gradients of every module are right until they are clipped: {clipping.note}", first.ratio)
    apart = next((r for r in (*alone.replicas, *found.replicas) if r.kind == "main_grad" and r.name == first.name), None)
    partial = _never_summed(alone, first)
    if partial is not None:
        text = f"the gradients that come back to {partial.name} are partial sums that nothing puts together, and so are all that follow from them: an all-reduce is missing"
        return Culprit(partial.name, "backward", partial.source, text, first.ratio)
    every = _all_of(alone, first.step, "main_grad", first.slot)
    if every:
        scale = _one_scale(alone)
        what = f"have {scale}" if scale else f"are wrong ({apart.note})" if apart is not None else "are wrong"
        return Culprit("", "gradient", "", f"{right}the gradients of all parameters {what} before the optimizer takes them: clipping, a loss scale or an average", first.ratio)
    why = apart.note if apart is not None else first.note or "its weight gradient, or what is done to it before the optimizer takes it"
    return Culprit(_owner(first.name), "gradient", first.source, f"{right}the gradient of {first.name} is not: {why}", first.ratio)


def _update(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """What the optimizer makes of the reference's gradients."""
    first = next((t for t in wrong if t.kind in ("opt_state", "param_after")), None)
    if first is None:
        return None
    every = _all_of(alone, first.step, first.kind, first.slot)
    what = f"given the reference's gradient{'s' if every else ''}, the update{'s' if every else ''} of {'all parameters are' if every else f'{first.name} is'} not the reference's"
    if first.kind == "opt_state":
        what += f" (its {first.slot})"
    told = [t.note for t in _told(found, alone) if t.name not in ("clip_coefficient", "grad_norm")]
    text = ": ".join(filter(None, [what, "; ".join(dict.fromkeys(filter(None, [first.note, *told])))]))
    return Culprit("" if every else _owner(first.name), "update", first.source, text, first.ratio)


def _master(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    first = next((t for t in wrong if t.kind == "master"), None)
    return Culprit(_owner(first.name), "update", first.source, f"{first.name}: {first.note}", first.ratio) if first is not None else None


def _begun_apart(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """Replicas that differ before the first step: what follows is right of the values that each rank has."""
    apart = next((r for r in found.replicas if r.kind == "param"), None)
    return Culprit(_owner(apart.name), "model", apart.source, f"{apart.name}: {apart.note}", apart.ratio) if apart is not None else None


def _setting(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    """A number that the optimizer is told, where it makes no difference yet."""
    told = [t for t in _told(found, alone) if t.name not in ("clip_coefficient", "grad_norm", "loss")]
    first = next((t for t in told if t.name == UPDATES), told[0] if told else None)
    if first is None:
        return None
    return Culprit("", "update", first.source, first.note if first.name == UPDATES else f"what the optimizer is told: {first.note}", first.ratio)


def _replica(found: Verdict, alone: Verdict, wrong: Sequence[TensorVerdict]) -> Culprit | None:
    apart = next((r for r in found.replicas if r.kind in ("param", "param_after")), None)
    if apart is None:
        return None
    side = "model" if apart.kind == "param" else "update"
    return Culprit(_owner(apart.name), side, apart.source, f"{apart.name}: {apart.note}", apart.ratio)


_LOOKS: Final[tuple[Look, ...]] = (_parameter, _begun_apart, _module, _buffer, _gradient, _update, _master, _replica, _setting)


def _between(found: Verdict, begins: TensorVerdict) -> Culprit:
    """Where the runs part first, where no module is wrong by itself up to there: what is done between modules."""
    side = "backward" if begins.kind in GRADIENTS else "forward"
    if begins.kind in ("output", "grad_input"):
        what = "result" if side == "forward" else "gradient of the input"
        text = f"the {what} of {begins.name or 'the model'} is not the reference's: {begins.note or 'it is computed otherwise'}"
        return Culprit(begins.name, side, begins.source, text, begins.ratio)
    what = "what goes into" if side == "forward" else "what comes back to"
    text = f"{what} {begins.name or 'the model'} is not the reference's{f': {begins.note}' if begins.note else ''}"
    return Culprit(around(found, begins.name), side, begins.source, text, begins.ratio)


def _unplaced(found: Verdict, begins: TensorVerdict | None) -> TensorVerdict | None:
    """Where a backward pass goes past a module whose forward is nobody's part of the reference's: the first of what is so, on the way to it."""
    if begins is None or begins.kind not in GRADIENTS:
        return None
    own = [t for t in found.tensors if t.kind in ("input", "output") and t.step == begins.step and t.call == begins.call and not t.phase]
    apart = [t for t in own if t.verdict == "unmapped" and math.isinf(t.rel_err)]
    return min(apart, key=flow) if any(t.name == begins.name for t in apart) else None


def _off_alone(alone: Verdict, begins: TensorVerdict) -> bool:
    """Whether a tensor of unknown layout is as far off on the reference's values."""
    place = (begins.step, begins.call, begins.kind, begins.name, begins.slot)
    same = next((t for t in alone.tensors if (t.step, t.call, t.kind, t.name, t.slot) == place), None)
    return same is not None and same.verdict == "unmapped" and same.ratio > 1.0


def around(found: Verdict, module: str) -> str:
    """The module whose forward calls a module: the nearest around it that is called itself, which lists of modules are not."""
    called = {t.name for t in found.tensors if t.kind in ("input", "output")}
    while module:
        module = _owner(module)
        if module in called:
            break
    return module


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _told(found: Verdict, alone: Verdict) -> list[TensorVerdict]:
    """Numbers that are wrong, with what is said of them."""
    return [t for v in (alone, found) for t in v.tensors if t.kind == "scalar" and failing(t) and t.note]


def _all_of(alone: Verdict, step: int, kind: str, slot: str) -> bool:
    """Whether all tensors of a kind are wrong that could be compared, those of several modules."""
    held = [t for t in alone.tensors if (t.kind, t.step, t.slot) == (kind, step, slot) and (failing(t) or t.verdict in COMPARED)]
    telling = [t for t in held if t.verdict != "no-power" and (failing(t) or t.abs_err)]
    return len(telling) >= LEAST and all(map(failing, telling)) and len({_owner(t.name) for t in telling}) > 1 and 2 * len(telling) > len(held)


def _one_scale(alone: Verdict) -> str:
    """The factor by which every gradient is wrong that optimizers took; "" where it is not one."""
    taken = [t for t in alone.tensors if t.kind == "main_grad" and t.slot != UNCLIPPED and t.verdict not in ("unmapped", "no-power")]
    said = {t.note for t in taken if failing(t)}
    scaled = len(said) == 1 and next(iter(said)).startswith("gradient scale ") and len(next(iter(said)).split()) == 3
    return next(iter(said)) if scaled and len(taken) > 2 and all(failing(t) or not t.abs_err for t in taken) else ""


def _partial_before(alone: Verdict, first: TensorVerdict, kind: str) -> TensorVerdict | None:
    """The last module inside the wrong one, or beside it, whose ranks hold addends of what the reference has."""
    inside = f"{first.name}." if first.name else ""
    held = [t for t in alone.tensors if t.kind == kind and t.layout == PARTIAL and t.order < first.order and t.step == first.step]
    found: TensorVerdict | None = None
    while near := [t for t in held if t.name.startswith(inside)]:
        found = max(near, key=lambda t: t.order)
        inside = f"{found.name}."
    return found


def _never_summed(alone: Verdict, first: TensorVerdict) -> TensorVerdict | None:
    """Where gradients of parameters are partial sums: the first module of the backward pass that got such a sum and whose own weight's gradient is one."""
    wrong = {_owner(t.name) for t in alone.tensors if t.kind == "main_grad" and failing(t) and t.note.startswith("partial sum") and t.step == first.step}
    held = [t for t in alone.tensors if t.kind == "grad_output" and t.layout == PARTIAL and t.step == first.step and t.name in wrong]
    return min(held, key=flow, default=None)


def _source(found: Verdict, alone: Verdict, module: str) -> str:
    return next((t.source for v in (alone, found) for t in v.tensors if t.name == module and t.kind in ("output", "input") and t.source), "")
