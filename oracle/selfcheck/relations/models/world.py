"""Two ranks with half of the batch each make the gradients of one rank with the whole: the model adds up over samples.

Worked out in one process, at the real step: the gradients of both halves, with what came back to their results, must add up to those of the
whole. Layers whose statistic is a rank's own (batch norm) differ by design; they are named. What ranks of a real job do
differently is seen by `tokens` and by running the program on other numbers of ranks (`--vary`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.axes import Batch, batch_of
from proctor.oracle.selfcheck.watching.chance import draws_in_training, refuse_kinks
from proctor.oracle.selfcheck.watching.gaps import Gap, gap
from proctor.oracle.selfcheck.watching.parting import Look, part
from proctor.oracle.selfcheck.watching.step import Call, Outputs, short
from proctor.oracle.selfcheck.watching.undropped import undropped
from proctor.oracle.selfcheck.watching.values import exchanged


@register
class World(ModelRelation):
    """Each half of the batch by itself."""

    name, claim = "world", "two ranks with half of the batch each make the gradients of one rank with the whole"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        batch = _as_in_training(call, batch_of(call))
        if any(p not in batch.outputs for p in call.gradients):
            raise NotApplicable("it returns a loss of the whole batch, which need not add up over samples")
        if not call.gradients:
            raise NotApplicable("no gradient came back to its results in this step")
        with undropped(call.module):
            _, whole = call.derive()
            local = _local(call)
            if local and self._apart(call, batch, whole):
                for module in _norms(call):
                    module.eval()  # statistics of a rank's own are said; what else depends on the batch is judged without them
                _, whole = call.derive()
                if not self._apart(call, batch, whole):
                    return Outcome(relation=self.name, verdict="by-design", reason=local, culprit=call.place(_names(call)[0]), expected="gradients add up over samples", seen="those of batch statistics do not")
            try:
                halves = self._halves(call, batch)
            except Unknown:
                raise
            except Exception as e:  # noqa: BLE001 - the program's own code
                raise Unknown(f"with half of the batch the model fails: {short(e)}") from None
            worst = gap(whole, halves, lambda: call.noise(lambda: call.derive()[1]), terms=_terms(call))
            lost = [n for n in whole if n not in halves]
            if worst.ratio <= 1.0 and not lost:
                return Outcome(relation=self.name, verdict="equivalent", error=worst.error, tolerance=worst.tolerance, reason=f"gradients of {len(whole)} parameters add up over the halves of the batch")
            if draws_in_training(call, whole):
                raise Unknown("the model draws random numbers in training, beside those of dropout")
            if not lost:
                refuse_kinks(call, whole, worst, lambda: call.derive()[1])
        return self._differs(call, batch, worst, lost)

    def _apart(self, call: Call, batch: Batch, whole: Outputs) -> bool:
        """Whether the halves do not add up to the whole."""
        try:
            halves = self._halves(call, batch)
        except Exception:  # noqa: BLE001 - the program's own code; said where it is judged
            return True
        return gap(whole, halves, lambda: call.noise(lambda: call.derive()[1]), terms=_terms(call)).ratio > 1.0 or whole.keys() != halves.keys()

    def _differs(self, call: Call, batch: Batch, worst: Gap, lost: list[str]) -> Outcome:
        name = worst.name or lost[0]
        half = _half(call, batch)
        culprit = part(call, call.evaluate, lambda: call.evaluate(half), _first_half(batch)) or call.place(name.rpartition(".")[0])
        return Outcome(
            relation=self.name, verdict="different", reason=f"the gradient of {name} over the halves of the batch differs by {worst.error:.2g} of its norm from that of the whole",
            expected="gradients add up over samples", seen=f"a difference of {worst.error:.2g} of the norm", culprit=culprit,
            error=worst.error, tolerance=worst.tolerance, advice="look for statistics over the batch and for divisions by its size inside the model",
        )  # fmt: skip

    def _halves(self, call: Call, batch: Batch) -> Outputs:
        total: Outputs = {}
        middle = batch.size // 2
        for low, high in ((0, middle), (middle, batch.size)):
            args = exchanged(call.inputs, _cut(batch.inputs, low, high))
            slopes = {p: _cut(batch.outputs, low, high)(p, t) for p, t in call.gradients.items()}
            for name, slope in call.derive(args, gradients=slopes)[1].items():
                total[name] = total[name] + slope if name in total else slope
        return total


def _as_in_training(call: Call, batch: Batch) -> Batch:
    """Where samples lie in what it returned in the step: in training a model may return other things than in evaluation."""
    axis, found = next(iter(batch.outputs.values())), dict(batch.outputs)
    for path in call.gradients:
        shape = call.results[path][0] if path in call.results else ()
        if path not in found and axis < len(shape) and shape[axis] == batch.size and shape.count(batch.size) == 1:
            found[path] = axis
    return replace(batch, outputs=found)


def _terms(call: Call) -> int:
    """How many rows of results a gradient adds up over, at most."""
    return max(int(g.numel()) // max(1, int(g.size(-1)) if g.ndim > 1 else 1) for g in call.gradients.values())


def _cut(axes: Mapping[str, int], low: int, high: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Takes some samples of tensors that have them along these axes."""
    return lambda path, tensor: tensor.narrow(axes[path], low, high - low) if path in axes else tensor


def _half(call: Call, batch: Batch) -> Any:
    return exchanged(call.inputs, _cut(batch.inputs, 0, batch.size // 2))


def _first_half(batch: Batch) -> Look:
    """A look at the samples that both have."""
    half = batch.size // 2

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        for axis in range(min(3, one.ndim)):
            if one.ndim == other.ndim and one.size(axis) * half == other.size(axis) * batch.size and one.size(axis) % batch.size == 0:
                return one.narrow(axis, 0, other.size(axis)), other
        return None if one.shape != other.shape else (one, other)

    return look


def _norms(call: Call) -> list[nn.Module]:
    return [m for m in call.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training and m.running_mean is not None]


def _names(call: Call) -> list[str]:
    norms = {id(m) for m in _norms(call)} or {id(m) for m in call.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    return [n for n, m in call.module.named_modules() if id(m) in norms]


def _local(call: Call) -> str:
    if not _norms(call):
        return ""
    names = _names(call)
    return f"batch statistics: {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} normalise by the samples of a rank unless they are synchronised (convert_sync_batchnorm)"
