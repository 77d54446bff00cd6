"""A causal model's past does not depend on its future.

A model is taken for causal if the program trains it to predict the next token (the targets of a loss, or another input, are its inputs, one further), or if most
of its results do not see the future. Where the model returns its loss alone, what that loss is given is looked at. Catches masks that are off by one, missing, or of the wrong side, and pads on the wrong side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.axes import other_tokens, tried
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.parting import Look, part
from proctor.oracle.selfcheck.watching.seen.losses import scored
from proctor.oracle.selfcheck.watching.step import Call, Outputs
from proctor.oracle.selfcheck.watching.values import exchanged

SHARE: Final = 0.9  # of the targets that must be the next inputs
LEAST: Final = 4  # positions
Run = Callable[..., Outputs]  # evaluates on a batch


@register
class Causal(ModelRelation):
    """Tokens from some position on become others; results before it stay."""

    name, claim = "causal", "what a causal model says of a position does not depend on later positions"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        path, ids, axis = _tokens(call)
        length = ids.size(axis)
        run: Run = call.evaluate
        results = call.baseline
        there = _positions(results, ids, axis)
        if not there:
            run = partial(scored, call)
            results = run()
            there = _positions(results, ids, axis) or _positions(results, ids.narrow(axis, 0, length - 1), axis)
            length = next((results[p].size(a) for p, a in there.items()), length)
        if not there:
            raise NotApplicable("no result has as many positions as the input")
        if not _predicts_next(call, ids, axis):
            raise NotApplicable("nothing says that it is causal: neither targets nor another input are its tokens one further")
        for cut in sorted({length - 1, length // 2, 1}):
            found = self._cut(call, run, results, path, axis, cut, there)
            if found is not None:
                return found
        return Outcome(relation=self.name, verdict="equivalent", reason=f"results before positions 1, {length // 2} and {length - 1} of {length} stay when what follows changes")

    def _cut(self, call: Call, run: Run, results: Outputs, path: str, axis: int, cut: int, there: dict[str, int]) -> Outcome | None:
        """Positions from `cut` on become others; `results`: what `run` gives of the batch as it is."""

        def change(at: str, tensor: torch.Tensor) -> torch.Tensor:
            if at != path:
                return tensor
            made = tensor.clone()
            later = made.narrow(axis, cut, made.size(axis) - cut)
            later.copy_(other_tokens(later, tensor))
            return made

        other = exchanged(call.inputs, change)
        seen = tried(call, other, "other tokens", run)

        def early(outputs: Mapping[str, torch.Tensor]) -> Outputs:
            return {p: outputs[p].narrow(a, 0, cut) for p, a in there.items()}

        worst = gap(early(results), early(seen), lambda: [early(s) for s in call.noise(run)])
        if worst.ratio <= 1.0:
            return None
        length = next(results[p].size(a) for p, a in there.items())
        culprit = part(call, call.evaluate, lambda: call.evaluate(other), _early(length, cut))
        return Outcome(
            relation=self.name, verdict="different",
            reason=f"results before position {cut} change by {worst.error:.2g} of their norm when only tokens from position {cut} on change",
            expected="the past does not depend on the future: the program trains it to predict the next token", seen=f"it does, {worst.ratio:.0f} × what rounding does",
            culprit=culprit or call.place(), error=worst.error, tolerance=worst.tolerance,
            advice="look at the attention mask (its diagonal, its side, whether it is used at all) and at pads of convolutions",
        )  # fmt: skip


def _positions(results: Outputs, ids: torch.Tensor, axis: int) -> dict[str, int]:
    """Results that have as many positions as the tokens: the axis of each."""
    return {p: a for p, t in results.items() if t.is_floating_point() and (a := _axis_of(t, ids, axis)) is not None}


def _tokens(call: Call) -> tuple[str, torch.Tensor, int]:
    """The input of tokens, and the axis of positions."""
    for path, (name, tensor) in call.named_inputs.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.ndim != 2 or "label" in name or "mask" in name:
            continue
        axis = next((a for a in (1, 0) if tensor.size(a) >= LEAST and _predicts_next(call, tensor, a)), None)
        if axis is not None:
            return path, tensor, axis
    raise NotApplicable("no input of tokens whose next ones are the targets of a loss, or another input")


def _predicts_next(call: Call, ids: torch.Tensor, axis: int) -> bool:
    """Whether the targets of a loss are the tokens, one further: as many, or all but the last."""
    following = ids.narrow(axis, 1, ids.size(axis) - 1)
    beside = [t for _, t in call.named_inputs.values() if t.shape == ids.shape and t is not ids and t.dtype != torch.bool]
    for target in (*call.targets, *beside):
        if target.is_floating_point() or not target.numel():
            continue
        flat = target.reshape(-1).to(ids.device)
        if flat.numel() == ids.numel():
            whole = flat.reshape(ids.shape)
            mine, real = whole.narrow(axis, 0, ids.size(axis) - 1), whole
        elif flat.numel() == following.numel():
            mine = real = flat.reshape(following.shape)
        else:
            continue
        counted = mine >= 0
        if bool(counted.any()) and float((mine == following)[counted].float().mean()) >= SHARE and not bool((real == ids[tuple(slice(0, n) for n in real.shape)])[real >= 0].all()):
            return True
    return False


def _axis_of(result: torch.Tensor, ids: torch.Tensor, axis: int) -> int | None:
    """The axis of positions of a result that begins as the tokens do."""
    if result.ndim >= 2 and result.shape[:2] == ids.shape:
        return axis
    return next((a for a in (1, 0, 2) if a < result.ndim and result.size(a) == ids.size(axis) and result.shape.count(ids.size(axis)) == 1), None)


def _early(length: int, cut: int) -> Look:
    """A look at positions before the cut."""

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not one.is_floating_point():
            return one, one  # tokens and targets are given; a target is a later token
        axes = [a for a in range(one.ndim) if one.size(a) == length]
        flat = one.ndim == 2 and one.size(0) > length and one.size(0) % length == 0
        if not axes or len(axes) > 2 or flat:
            return None  # another axis is as long by accident, and which are positions cannot be told
        for axis in axes if len(axes) == 2 and one.ndim >= 3 else axes[:1]:
            one, other = one.narrow(axis, 0, cut), other.narrow(axis, 0, cut)
        return one, other

    return look
