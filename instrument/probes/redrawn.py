"""Whether what a model was loaded with is there when it is called for the first time.

A row of `Value.KEPT`, `redrawn`, once in a run, before the first update: a model was loaded, and by its first call all of its matrices, three at least, hold other numbers that have nothing to do with the loaded ones (their correlation
over a few elements of each is that of chance). Initialising behind the load does so: `load_model()`, then `model.apply(init_weights)`. A head that is drawn anew on purpose leaves the others; weights that are pruned, averaged, perturbed or cast resemble
what was loaded; and what is loaded a second time counts from then on. Who calls the model in between has used what was loaded, as an ensemble or a fold does that begins anew, and nothing is said.
Cost: a few elements of each matrix at the first loads, and at the first call behind each.
"""

from __future__ import annotations

import math
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import unseen
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._held import is_plain
from proctor.instrument.probes.loose import TAKES
from proctor.invariants.schema import MODEL_CALL, Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_LOADS: Final = 16
_MATRICES: Final = 64  # of a model, spread over it
_LEAST: Final = 3
_ELEMENTS: Final = 32  # of a matrix, spread over it
_CHANCE: Final = 0.3  # correlation; of 96 pairs of numbers that have nothing to do with each other it lies below in 997 of 1,000 cases


@register
class Redrawn(Probe):
    """Models that are initialised behind their load."""

    name = "redrawn"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._loads = 0
        self._loaded: dict[int, tuple[TensorRef[Any], list[float]]] = {}  # matrices, by id, and elements that were loaded

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == TAKES:
            return None, self._takes
        if function == MODEL_CALL:
            return self._called, None
        return (self._updates, None) if function == _UPDATE else NO_HOOKS

    def thinned(self) -> None:
        self._ends()

    def _ends(self) -> None:
        self.over, self._loaded = True, {}

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._ends()

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if self.over or raised or self._loads >= _LOADS:
            return
        self._loads += 1
        for p in _matrices(args[0]):
            self._loaded[id(p)] = TensorRef(p), _elements(p)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self._loaded or self.over:
            return
        found = [(name, p, known[1]) for name, p in plainly.named_parameters(args[0]) if (known := self._loaded.pop(id(p), None)) is not None and known[0]() is p]
        if len(found) < _LEAST:
            return
        pairs: list[tuple[float, float]] = []
        for _, p, before in found:
            now = _elements(p)
            if now == before or (one := _standard(before)) is None or (other := _standard(now)) is None:
                return  # it is there, or nothing can be told
            pairs += zip(one, other, strict=True)
        if abs(sum(a * b for a, b in pairs)) / len(pairs) < _CHANCE and len(pairs) >= _LEAST * _ELEMENTS:
            kind = type(args[0]).__name__
            seen = f"{kind} was loaded, and all of its matrices, such as {found[0][0]} ({len(found)} were looked at), hold other numbers by its first call, which have nothing to do with what was loaded"
            self.sink.number(found[0][0], float(len(found)), kind=Value.KEPT, facts={"what": "redrawn", "seen": seen})
            self._ends()


def _matrices(module: Any) -> list[Any]:
    """Some of the matrices of a model, spread over it."""
    found = [p for p in plainly.parameters(module) if is_plain(p) and p.dim() > 1 and p.numel() >= _ELEMENTS and p.is_floating_point()]
    return found[:: max(1, math.ceil(len(found) / _MATRICES))]


def _elements(p: Any) -> list[float]:
    with unseen():
        flat = p.detach().reshape(-1)
        return [float(x) for x in flat[:: flat.numel() // _ELEMENTS][:_ELEMENTS].tolist()]


def _standard(numbers: list[float]) -> list[float] | None:
    """With a mean of 0 and a deviation of 1; `None` where all are alike, or one is not finite."""
    mean = sum(numbers) / len(numbers)
    spread = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    return [(x - mean) / spread for x in numbers] if math.isfinite(spread) and spread > 0 else None
