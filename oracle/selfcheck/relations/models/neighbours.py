"""A sample's result does not depend on the samples beside it, in evaluation.

Catches statistics of the batch where running ones were meant, softmax and norms along the wrong axis, reshapes that mix rows.
"""

from __future__ import annotations

import torch
from torch import nn

from proctor.oracle.selfcheck import ModelRelation, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.axes import Batch, batch_of, tried
from proctor.oracle.selfcheck.watching.chance import OneForAll, draws
from proctor.oracle.selfcheck.watching.gaps import Gap, gap
from proctor.oracle.selfcheck.watching.parting import Look, part
from proctor.oracle.selfcheck.watching.step import Call, Outputs
from proctor.oracle.selfcheck.watching.values import exchanged, same_bits


@register
class Neighbours(ModelRelation):
    """All samples but one become others, once beside the first and once beside the last; the result of that one stays."""

    name, claim = "neighbours", "in evaluation, a sample's result does not depend on the samples beside it"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        batch = batch_of(call)
        first = self._beside(call, batch, 0)
        if first.verdict != "equivalent":
            return first
        try:
            last = self._beside(call, batch, batch.size - 1)
        except Unknown:  # sorted sequences, of which the last one may not come first
            return first
        return first if last.verdict == "equivalent" else last

    def _beside(self, call: Call, batch: Batch, at: int) -> Outcome:
        """With other samples beside the one at this place."""
        which = "last" if at else "first"
        other = _others(call, batch, at)
        if all(same_bits(t, other_t) for (_, t), other_t in zip(call.named_inputs.values(), _leaves(other), strict=True)):
            raise Unknown("all samples of the batch are equal, so there is nothing to exchange")
        seen = tried(call, other, f"other samples beside the {which} one")
        worst, known = _moved(call, batch, at, call.baseline, seen)
        if worst.ratio <= 1.0:
            return Outcome(relation=self.name, verdict="equivalent", error=worst.error, tolerance=worst.tolerance, reason=f"{known} results of a sample stay, bit for bit or within rounding; {batch.why}")
        why = _by_design(call)
        if draws(call):  # a model that sorts its samples gives each another part of what it draws
            with OneForAll(batch.size):
                worst, _ = _moved(call, batch, at, call.evaluate(), call.evaluate(other))
            if worst.ratio <= 1.0:
                raise Unknown("the model draws random numbers in evaluation, and which of them a sample gets depends on the samples beside it")
        found = part(call, call.evaluate, lambda: call.evaluate(other), row_of(batch, at))
        return Outcome(
            relation=self.name,
            verdict="by-design" if why else "different",
            reason=why or f"result {worst.name or 'of the model'} of the {which} sample changes by {worst.error:.2g} of its norm when only other samples change",
            expected="the result of a sample is that of the sample alone",
            seen=f"it changes by {worst.error:.2g} of its norm, {worst.ratio:.0f} × what rounding does",
            culprit=found or call.place(),
            error=worst.error,
            tolerance=worst.tolerance,
            advice="look for a reduction, softmax, norm or reshape along the axis of the batch, and for an index that has to be moved by the sample's place",
        )


def _moved(call: Call, batch: Batch, at: int, results: Outputs, seen: Outputs) -> tuple[Gap, int]:
    """How far the results of the sample at this place are from each other, and how many they are."""
    one = {p: results[p].select(a, at) for p, a in batch.outputs.items()}
    two = {p: seen[p].select(a, at) for p, a in batch.outputs.items() if p in seen and seen[p].shape == results[p].shape}
    return gap(one, two, lambda: [{p: s[p].select(a, at) for p, a in batch.outputs.items()} for s in call.noise(call.evaluate)]), len(two)


def row_of(batch: Batch, at: int = 0) -> Look:
    """A look at one sample of any tensor that has samples along an axis, or B times as many rows."""

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        axis = next((a for a in range(min(3, one.ndim)) if one.size(a) == batch.size), None)
        flat = set(batch.inputs.values()) == {0} and one.ndim > 0 and one.size(0) > batch.size and one.size(0) % batch.size == 0
        if axis is not None:  # unless it is as long by accident, and the rows are those of all samples
            return None if flat else (one.select(axis, at), other.select(axis, at))
        if flat:
            rows = one.size(0) // batch.size
            return one[at * rows : (at + 1) * rows], other[at * rows : (at + 1) * rows]
        return None

    return look


def _others(call: Call, batch: Batch, at: int) -> tuple[object, ...]:
    """The batch with other samples beside the first or the last one: the one next to it is gone, it is there twice, and the others are moved by a little where they are numbers."""
    mine, n = torch.tensor([at]), batch.size
    rest = torch.cat([torch.arange(2, n), mine]) if at == 0 else torch.cat([mine, torch.arange(n - 2)])  # other ones, not only others' places
    order = torch.cat([mine, rest] if at == 0 else [rest, mine])

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = batch.inputs.get(path)
        if axis is None:
            return tensor
        made = tensor.index_select(axis, order.to(tensor.device)).clone()
        if tensor.is_floating_point() and int(tensor.unique().numel()) > 2:
            rest = made.narrow(axis, 1 if at == 0 else 0, n - 1)
            rest.mul_(1.25).add_(0.25 * float(tensor.detach().float().std()) if tensor.numel() > 1 else 0.25)
        return made

    return tuple(exchanged(call.inputs, change))


def _leaves(value: object) -> list[torch.Tensor]:
    from proctor.oracle.selfcheck.watching.values import tensors

    return [t for _, t in tensors(value)]


def _by_design(call: Call) -> str:
    for name, module in call.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return f"{name} ({type(module).__name__}) keeps no running statistics: it normalises by the batch in evaluation, as it was told to"
    return ""
