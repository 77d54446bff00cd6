"""Whether a backward pass begins at losses that are all exactly 0.

A row of `Value.SPENT` for each such pass. Behind a hinge that all samples of a batch have passed there is nothing to learn: gradients are rightly zero (`numeric`, `alive`).
Cost: a number is read from each loss on the CPU; a device is not asked.
"""

from __future__ import annotations

from typing import Any

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, register
from proctor.instrument.probes.graphs import BACKWARD, losses
from proctor.instrument.probes.source import reading
from proctor.invariants.schema import Value


@register
class Spent(Probe):
    """Losses of which nothing is left."""

    name = "spent"
    kinds = frozenset({Value.SPENT})

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._backward, None) if function == BACKWARD else NO_HOOKS

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given = losses(args, kwargs)
        if given and all(reading.number(loss) == 0.0 for loss in given):
            self.sink.number("loss", 0.0, kind=Value.SPENT)
