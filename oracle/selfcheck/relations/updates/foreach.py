"""The optimizer's fast paths make the update that its loop makes: `foreach` and `fused` against neither.

On the real parameters, gradients and state of the step. Catches an implementation of one's own, or a library's, that treats a case otherwise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

from proctor.oracle.selfcheck import NotApplicable, Unknown, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.gaps import Gap, gap
from proctor.oracle.selfcheck.watching.step import Update, short
from proctor.oracle.selfcheck.watching.values import UNIT, difference

PATHS: Final = ("foreach", "fused")
ROUNDING: Final = 1e-4  # relative error of an update; the paths round in another order


@register
class Foreach(UpdateRelation):
    """Steps a copy of the optimizer along each path."""

    name, claim = "foreach", "the optimizer's foreach and fused paths make the update of its loop"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        groups = update.optimizer.param_groups
        paths = [p for p in PATHS if all(p in g for g in groups)]
        if not paths:
            raise NotApplicable(f"{update.name} has no foreach and no fused path")
        loop, size = _step(update, {}), {str(id(p)): float(p.detach().norm()) for p in update.parameters()}
        if gap(loop, _step(update, {})).ratio > 1.0:
            raise Unknown("two steps from the same state differ: it keeps state beside its state_dict, or draws random numbers")
        held, said = [], []
        for path in paths:
            try:
                other = _step(update, {path: True})
            except Exception as e:  # noqa: BLE001 - not every path takes every case
                said.append(f"{path}: {short(e)}")
                continue
            worst = _worst(loop, other, size)
            if worst.ratio > 1.0:
                where = update.owners.get(int(worst.name))
                return Outcome(
                    relation=self.name, verdict="different", reason=f"the update of {where[1] if where else 'a parameter'} by {path} differs by {worst.error:.2g} of its norm from that of the loop",
                    expected="the loop's update", seen=f"a difference of {worst.error:.2g}", error=worst.error, tolerance=worst.tolerance,
                    culprit=Culprit(where[1].rpartition(".")[0] if where else "", update.name, _line(update.optimizer), path), advice=f"compare the {path} implementation with the loop",
                )  # fmt: skip
            held.append(path)
        if not held:
            raise Unknown("; ".join(said))
        return Outcome(relation=self.name, verdict="equivalent", reason=f"{' and '.join(held)} make the update of the loop")


def _worst(loop: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], size: Mapping[str, float]) -> Gap:
    """The worst update: it is the difference of two parameters, so their rounding is in it."""
    worst = Gap()
    for name, one in loop.items():
        error, norm = difference(one, other[name])
        allowed = ROUNDING * norm + 4.0 * UNIT.get(one.dtype, 2.0**-24) * size[name]
        if error and error > worst.ratio * allowed:
            worst = Gap(name, error / norm if norm else float("inf"), allowed / norm if norm else float("inf"), error / allowed if allowed else float("inf"))
    return worst


def _step(update: Update, flags: dict[str, bool]) -> dict[str, torch.Tensor]:
    """Updates by id of the parameter, along one path; parameters and state are put back."""
    optimizer = update.optimizer
    state = copy.deepcopy(optimizer.state_dict())
    before = [(p, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in update.parameters()]
    flagged: list[tuple[dict[str, Any], dict[str, Any]]] = [(g, {k: g[k] for k in PATHS if k in g}) for g in optimizer.param_groups]
    try:
        for group, known in flagged:
            group.update({k: flags.get(k, False) for k in known})
        step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        with torch.no_grad():
            step(optimizer)
        return {str(id(p)): p.detach() - old for p, old, _ in before}
    finally:
        with torch.no_grad():
            for parameter, value, grad in before:
                parameter.copy_(value)
                parameter.grad = grad
        optimizer.load_state_dict(state)
        for group, (_, known) in zip(optimizer.param_groups, flagged, strict=True):
            group.update(known)


def _line(optimizer: Any) -> str:
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and "/torch/optim/" not in code.co_filename else ""
