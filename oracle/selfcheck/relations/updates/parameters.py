"""Every parameter that an optimizer holds matters: some update had a gradient for it that is not zero.

Catches graphs that are cut (`detach`, `.data`, `no_grad`, `.item()`), layers whose result is thrown away, and a model that was replaced after
the optimizer was made. Parameters of modules that never run are said, and are no failure: a library's spare parts look so. Nor are those that the program moves by itself:
a target or an average in an optimizer, which leaves alone what has no gradient. Nor are those whose gradient the program
takes away behind the backward, as where a layer is to rest for the first epoch: the graph reaches them.
"""

from __future__ import annotations

from typing import Any

import torch

from proctor.oracle.selfcheck import NotApplicable, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.step import Update, written_at

SHOWN = 4


@register
class Parameters(UpdateRelation):
    """Looks at the gradients of all updates so far."""

    name, claim = "parameters", "every parameter that the optimizer trains has a part in the loss"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        held = [p for p in update.parameters() if isinstance(p, torch.Tensor) and p.requires_grad]
        if not held:
            raise NotApplicable("the optimizer holds no parameter that requires gradients")
        dead = [p for p in held if not update.moved.get(id(p), False)]
        if not dead:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"all {len(held)} parameters had a gradient in one of {update.step + 1} updates")
        by_hand = [p for p in dead if update.by_hand.get(id(p), False)]
        if len(by_hand) == len(dead) < len(held):
            return Outcome(relation=self.name, verdict="by-design", reason=f"{len(dead)} of {len(held)} parameters have no gradient, and are moved by the program itself, as a target or an average is")
        dead = [p for p in dead if not update.by_hand.get(id(p), False)] or dead
        taken = [p for p in dead if update.taken.get(id(p), False)]
        if len(taken) == len(dead) < len(held):
            return Outcome(relation=self.name, verdict="by-design", reason=f"{len(dead)} of {len(held)} parameters had a gradient after the backward, which the program took away before the optimizer stepped")
        dead = [p for p in dead if not update.taken.get(id(p), False)] if len(dead) < len(held) else dead
        known = [(p, update.owners.get(id(p))) for p in dead]
        strays = [p for p, owner in known if owner is None]
        ran = [(p, o) for p, o in known if o is not None and id(o[2]) in update.called and not _cancels(p, o, update)]
        if len(dead) == len(held):
            return self._differs(update, [o[1] for _, o in known if o is not None] or ["all of them"], known, "none of its parameters had a gradient in any update: it trains another model, or the graph is cut")
        if ran:
            return self._differs(update, [o[1] for _, o in ran], ran, f"{len(ran)} of {len(held)} parameters never had a gradient although their modules ran")
        if strays and update.models:
            return self._differs(update, [f"{len(strays)} parameters of no model that runs"], [], f"{len(strays)} of {len(held)} parameters belong to no model that was called: the model may have been replaced after the optimizer was made")
        names = ", ".join(o[1] for _, o in known if o is not None)[:200]
        return Outcome(relation=self.name, verdict="by-design", reason=f"{len(dead)} of {len(held)} parameters are in modules that never ran, or their gradients cancel: {names}")

    def _differs(self, update: Update, names: list[str], known: list[Any], why: str) -> Outcome:
        owner = next((o for _, o in known if o is not None), None)
        culprit = None
        if owner is not None:
            path = owner[1].rpartition(".")[0]
            culprit = Culprit(path, type(owner[2]).__name__, written_at(owner[2]) or written_at(owner[0]))
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        return Outcome(
            relation=self.name, verdict="different", reason=why, expected="a gradient that is not zero in some update", seen=f"none in {update.step + 1} updates: {shown}",
            culprit=culprit, advice="look for detach, .data, no_grad or .item() between these parameters and the loss, and for results that nobody uses",
        )  # fmt: skip


def _cancels(parameter: torch.Tensor, owner: tuple[Any, str, Any], update: Update) -> bool:
    """A bias that the graph reaches with a gradient of zero beside a weight that moves: a loss of differences (WGAN) does not see it."""
    beside = [p for p in owner[2].parameters(recurse=False) if p is not parameter]
    return parameter.ndim <= 1 and parameter.grad is not None and any(update.moved.get(id(p), False) for p in beside)
