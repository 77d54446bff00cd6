"""Activation checkpointing on and off gives the same gradients.

A program that checkpoints is run without it; of one that does not, each block is checkpointed. Catches forwards with side effects: counters,
random numbers of numpy or Python, inputs that are changed in place, masks that are drawn anew in the recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch.utils.checkpoint as library
from torch import nn

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.seen.recomputed import uncheckpointed
from proctor.oracle.selfcheck.watching.step import Call, short

APART: Final = 1e-5  # relative error of a gradient


@register
class Checkpointing(ModelRelation):
    """Compares gradients with and without."""

    name, claim = "checkpointing", "activation checkpointing on and off gives the same gradients"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        with uncheckpointed() as used:
            _, plain = call.derive()
        how = "without the program's checkpointing" if used else "with every block checkpointed"
        try:
            if used:
                _, other = call.derive()
            else:
                with _checkpointed(call.module):
                    _, other = call.derive()
        except NotApplicable:
            raise
        except Exception as e:  # noqa: BLE001 - the program's own code, or checkpointing that finds another recomputation
            if "different metadata" in str(e) or "different number of tensors" in str(e):
                return self._differs(call, "", 1.0, 0.0, how, f"the recomputation does something else than the first pass: {short(e)}")
            raise Unknown(f"{how} the step fails: {short(e)}") from None
        again = call.derive()[1] if used else None
        worst = gap(plain, other)  # the same operations in the same order: no noise is allowed for
        if worst.error > APART and (again is None or gap(other, again).ratio <= 1.0):
            return self._differs(call, worst.name, worst.error, worst.tolerance, how, f"the gradient of {worst.name} is another {how}")
        return Outcome(relation=self.name, verdict="equivalent", error=worst.error, tolerance=worst.tolerance, reason=f"gradients of {len(plain)} parameters are the same {how}")

    def _differs(self, call: Call, name: str, error: float, tolerance: float, how: str, reason: str) -> Outcome:
        return Outcome(
            relation=self.name, verdict="different", reason=reason, expected="what is computed again is what was computed first", seen=f"a difference of {error:.2g} of the norm",
            culprit=_stateful(call) or call.place(name.rpartition(".")[0]), error=error, tolerance=tolerance,
            advice="look for counters, numpy's or Python's random numbers, in-place changes of inputs, and preserve_rng_state=False",
        )  # fmt: skip


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules, else the children."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) and part is not module:
            return [m for m in part if next(m.parameters(), None) is not None]
    return [m for m in module.children() if next(m.parameters(), None) is not None]


@contextlib.contextmanager
def _checkpointed(module: nn.Module) -> Iterator[None]:
    blocks = _blocks(module)
    if not blocks:
        raise NotApplicable("it has no blocks that could be checkpointed")

    def around(forward: Any) -> Any:
        return lambda *args, **kwargs: library.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    try:
        for block in blocks:
            block.forward = around(block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


def _stateful(call: Call) -> Any:
    """The first module with a plain number that its forward changes."""
    before = {n: _numbers(m) for n, m in call.module.named_modules()}
    with contextlib.suppress(Exception):
        call.evaluate(training=True)
    return next((call.place(n) for n, m in call.module.named_modules() if before[n] != _numbers(m)), None)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int | float) and k != "training"}
