"""Whether parameters that are thawed while the model trains are given to an optimizer.

Rows of `Value.KEPT`, `thawed`: of parameters of a model that were frozen in its first training forward and train since, at the second update at which they have gradients. They
are in no optimizer, and have not moved. Cost: a look at the frozen parameters of a model at each step, 30 ns each.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._held import Optimizers, is_plain, telling
from proctor.invariants.schema import MODEL_CALL, Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_MADE: Final = "torch.optim.Optimizer.__init__"
_MODELS: Final = 8
_FROZEN: Final = 4096
_OPTIMIZERS: Final = 4096
_UPDATES: Final = 2  # with gradients of thawed parameters, before it is said that nobody has them


class _Thawed:
    """Parameters of a model that began to train together."""

    def __init__(self, found: list[tuple[str, Any]]) -> None:
        self.parameters = [(name, TensorRef(p), telling(p)) for name, p in found]
        self.updates = 0


@register
class Thawing(Probe):
    """Parameters that begin to train."""

    name = "thawing"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._models: set[int] = set()
        self._frozen: list[tuple[str, weakref.ref[Any]]] = []
        self._optimizers = Optimizers(_OPTIMIZERS)
        self._thawed: list[_Thawed] = []

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if function == _MADE:
            return None, lambda args, kwargs, result, raised: self._know(args[0])
        return (self._updates, None) if function == _UPDATE else NO_HOOKS

    def _know(self, optimizer: Any) -> None:
        if not self._optimizers.know(optimizer):
            self.over, self._frozen, self._thawed = True, [], []

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model = args[0]
        if id(model) in self._models or len(self._models) >= _MODELS or not model.training or next(plainly.parameters(model), None) is None:
            return
        self._models.add(id(model))
        frozen = [(name, p) for name, p in list(plainly.named_parameters(model))[:_FROZEN] if not p.requires_grad]
        self._frozen += [(name, TensorRef(p)) for name, p in frozen][: _FROZEN - len(self._frozen)]

    def step_begins(self, step: int) -> None:
        found: list[tuple[str, weakref.ref[Any]]] = []
        rest: list[tuple[str, weakref.ref[Any]]] = []
        for name, ref in self._frozen:
            p = ref()
            if p is not None:
                (found if p.requires_grad else rest).append((name, ref))
        self._frozen = rest
        known = [(name, p) for name, ref in found if (p := ref()) is not None and is_plain(p)]
        if known:
            self._thawed.append(_Thawed(known))

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._know(args[0])
        for thawed in list(self._thawed):
            asked = [(name, p, first) for name, ref, first in thawed.parameters if (p := ref()) is not None and p.requires_grad]
            grads = self.sink.gradients(p for _, p, _ in asked) or ()
            mine = [one for one, grad in zip(asked, grads) if grad is not None]
            if not mine:
                continue
            thawed.updates += 1
            if thawed.updates < _UPDATES:
                continue
            self._thawed.remove(thawed)
            held = self._optimizers.held()
            lost = [name for name, p, first in mine if id(p) not in held and telling(p) == first]
            seen = f"{lost[0]}, as {len(lost)} of {len(mine)} parameters that were thawed, has gradients, is in no optimizer and does not move" if lost else ""
            self.sink.number(lost[0] if lost else mine[0][0], float(len(lost)), kind=Value.KEPT, facts={"what": "thawed", "seen": seen})
