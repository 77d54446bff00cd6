"""A permuted batch gives permuted results, in evaluation.

Catches what depends on the place of a sample in its batch: reshapes that mix axes, buffers indexed by row, pairs of samples.
"""

from __future__ import annotations

import torch

from proctor.oracle.selfcheck import ModelRelation, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.axes import Batch, batch_of, permuted, rotation, tried
from proctor.oracle.selfcheck.watching.chance import draws
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.parting import Look, part
from proctor.oracle.selfcheck.watching.step import Call


@register
class Permutation(ModelRelation):
    """The batch rotated by one."""

    name, claim = "permutation", "in evaluation, a permuted batch gives permuted results"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        batch = batch_of(call)
        results = call.baseline
        order = rotation(batch.size)
        other = permuted(call, batch, order)
        seen = tried(call, other, "a permuted batch")
        wanted = {p: results[p].index_select(a, order) for p, a in batch.outputs.items()}
        worst = gap(wanted, {p: t for p, t in seen.items() if p in wanted and t.shape == wanted[p].shape}, lambda: [
            {p: s[p].index_select(a, order) for p, a in batch.outputs.items()} for s in call.noise(call.evaluate)])  # fmt: skip
        if worst.ratio <= 1.0:
            return Outcome(relation=self.name, verdict="equivalent", error=worst.error, tolerance=worst.tolerance, reason=f"{len(wanted)} results are permuted as the batch is")
        if draws(call):
            raise Unknown("the model draws random numbers in evaluation, which lie otherwise in a permuted batch")
        found = part(call, call.evaluate, lambda: call.evaluate(other), moved(batch, order))
        return Outcome(
            relation=self.name, verdict="different",
            reason=f"result {worst.name or 'of the model'} of a permuted batch differs by {worst.error:.2g} of its norm from the permuted result",
            expected="the same results, in the order of the samples", seen=f"a difference of {worst.error:.2g} of the norm, {worst.ratio:.0f} × what rounding does",
            culprit=found or call.place(), error=worst.error, tolerance=worst.tolerance,
            advice="look for a view or reshape across the axis of the batch, and for what is indexed by the place in the batch",
        )  # fmt: skip


def moved(batch: Batch, order: torch.Tensor) -> Look:
    """A look at tensors with samples along an axis, brought back to one order."""

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        axis = next((a for a in range(min(3, one.ndim)) if one.size(a) == batch.size), None)
        flat = set(batch.inputs.values()) == {0} and one.ndim > 0 and one.size(0) > batch.size and one.size(0) % batch.size == 0
        if axis is not None:
            return None if flat else (one.index_select(axis, order), other)
        if flat:
            rows = one.size(0) // batch.size
            return one.unflatten(0, (batch.size, rows)).index_select(0, order).flatten(0, 1), other
        return None

    return look
