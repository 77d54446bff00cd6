"""Each sample's result meets its own target, and no other: nothing that is compared was broadcast to all pairs.

Catches `values - targets` of shapes (N, 1) and (N,), in reinforcement learning and regression: the loss falls, and the model learns the mean of the targets.
"""

from __future__ import annotations

import torch

from proctor.oracle.selfcheck import NotApplicable, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.step import Update


@register
class Paired(UpdateRelation):
    """Looks at the shapes of what was subtracted, multiplied, or given to a loss in this update."""

    name, claim = "paired", "a sample's result is compared with its own target"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        if not update.met:
            raise NotApplicable("no result of a model meets another tensor outside of it, by a loss, a difference or a product")
        if not update.crossed:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"{update.met} times results met other tensors, number by number")
        first = update.crossed[0]
        return Outcome(
            relation=self.name, verdict="different", reason=f"a result of shape {first.one} meets one of shape {first.other}: torch broadcasts them, and every sample is compared with the targets of all",
            expected="one target for each sample", seen=f"shapes {first.one} and {first.other}, which become {tuple(torch.broadcast_shapes(first.one, first.other))}",
            culprit=Culprit("", first.op, first.line), advice="give both the same shape (squeeze, unsqueeze, view) before they are compared",
        )  # fmt: skip
