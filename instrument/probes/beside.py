"""Whether a step that trains a model calls another one of its class, which it does not train: a target network, a teacher, an average, a reference.

Rows of `Value.MANNER`, mode `beside`, of every four of the first steps in which something trained: the class of a model that ran for training `has` another of its class beside it, or `lacks` it in all
four (updates of a policy between those of its critics call no target). A program that calls the model itself in the place of
its target makes as many calls as before, and only which object is called is another. A call is no training where gradients are off, or where no parameter of what is called takes part.

Cost: a microsecond a call of a model, of 64 steps.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

ANOTHER: Final = "another of its class, which it does not train"
_STEPS: Final = 64
_TOGETHER: Final = 4
_CLASSES: Final = 16


@register
class Beside(Probe):
    """Models that run beside one of their class."""

    name = "beside"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._left = _STEPS
        self._trained: dict[str, set[int]] = {}  # ids of what ran, by class
        self._other: dict[str, set[int]] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return (self._called, None) if function == MODEL_CALL else NO_HOOKS

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._left <= 0:
            return
        import torch

        model = args[0]
        first = next(model.parameters(), None)
        if first is None:  # a loss, an augmentation
            return
        trains = torch.is_grad_enabled() and (first.requires_grad or any(p.requires_grad for p in model.parameters()))
        into = self._trained if trains else self._other
        if len(into) < _CLASSES or class_name(model) in into:
            into.setdefault(class_name(model), set()).add(id(model))

    def step_begins(self, step: int) -> None:
        if self._left <= 0 or not self.sink.live or not self._trained:
            return
        self._left -= 1
        if self._left % _TOGETHER:
            return
        trained, other = self._trained, self._other
        self._trained, self._other = {}, {}
        for name, mine in sorted(trained.items()):
            there = bool(other.get(name, set()) - mine)
            seen = "" if there else f"only the {name.rpartition('.')[2]} that trains was called"
            self.sink.number(name, float(there), kind=Value.MANNER, call=0, facts={"mode": "beside", "has": ANOTHER if there else "", "lacks": "" if there else ANOTHER, "seen": seen})

    def thinned(self) -> None:
        self._left = 0  # of a step that is left out nobody knows what was called
