"""Whether half of what a layer gives is used by nothing.

A row of `Value.KEPT`, `half`, once for a layer (linear or convolution): in the first three updates that it has gradients in, those of half of its outputs, the first or the second half, are 0 to the last bit, and
those of the others are not. Layers whose results are cut in two (a gate, a mean and a variance, keys and values) are made for both; a slice that is taken twice, or a part that the loss leaves out, leaves one without a use.
Rows that are 0 here and there (units that rest, actions that nobody took) are none, nor is a layer with as many outputs as a loss has classes: those of another task may be masked. Only parameters on the CPU are looked at. Cost: a look at the gradients of these layers, in three updates.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_UPDATES: Final = 3
_LAST: Final = 16  # updates at which anything is looked at
_LEAST: Final = 8  # outputs
_LAYERS: Final = 256
_LARGEST: Final = 1 << 22  # elements
_USED: Final = 0.9  # of the outputs of the other half
_LOSSES: Final = frozenset({"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss", "torch.nn.functional.softmax", "torch.nn.functional.log_softmax"})


@register
class Halves(Probe):
    """Halves of layers without gradients."""

    name = "halves"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._updates = 0
        self._layers: dict[int, tuple[weakref.ref[Any], str]] = {}  # weights and what they are called
        self._models: set[int] = set()
        self._classes: set[int] = set()
        self._seen: dict[int, list[int]] = {}  # by weight: the half without gradients at each update, 0 or 1; -1: neither

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if function in _LOSSES:
            return self._judged, None
        return (self._steps, None) if function == _UPDATE else NO_HOOKS

    def thinned(self) -> None:
        self.over, self._layers = True, {}

    def _judged(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        scores: Any = args[0] if args else (kwargs or {}).get("input")
        shape: Any = getattr(scores, "shape", ())
        if not self.over and len(shape) > 1 and len(self._classes) < _LAYERS:
            self._classes.add(int(shape[1]))
            self._classes.add(int(shape[-1]))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model = args[0]
        if self.over or id(model) in self._models or not getattr(model, "training", False) or len(self._layers) >= _LAYERS:
            return
        import torch

        self._models.add(id(model))
        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        for name, layer in plainly.named_modules(model):
            # One that is computed (a spectral norm) is no parameter of the layer, and to ask for it would compute it within the program's forward.
            weight: Any = layer._parameters.get("weight") if type(layer) in kinds or isinstance(layer, kinds[1:]) else None
            if type(weight) is torch.nn.Parameter and weight.device.type == "cpu" and weight.shape[0] >= _LEAST and weight.shape[0] % 2 == 0 and weight.numel() <= _LARGEST:
                self._layers.setdefault(id(weight), (TensorRef(weight), f"{name}.weight" if name else "weight"))

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.over:
            return
        self._updates += 1
        if self._updates > _LAST:
            self.thinned()
            return
        mine: list[Any] = [p for group in args[0].param_groups for p in group["params"] if id(p) in self._layers and self._layers[id(p)][0]() is p]
        grads = self.sink.gradients(mine)
        for p, grad in zip(mine, grads or ()):
            if grad is None or grad.is_sparse:
                continue
            seen = self._seen.setdefault(id(p), [])
            if len(seen) >= _UPDATES:
                continue
            seen.append(_idle_half(grad))
            if len(seen) == _UPDATES and len(set(seen)) == 1 and seen[0] >= 0 and int(p.shape[0]) not in self._classes:
                self._tell(self._layers[id(p)][1], seen[0], int(p.shape[0]))

    def _tell(self, name: str, half: int, outputs: int) -> None:
        first, last = (0, outputs // 2 - 1) if half == 0 else (outputs // 2, outputs - 1)
        seen = f"nothing uses half of what {name} makes: outputs {first} to {last} of {outputs} had no gradient in {_UPDATES} updates, the others had"
        self.sink.number(name, float(half), kind=Value.KEPT, facts={"what": "half", "seen": seen})


def _idle_half(grad: Any) -> int:
    """The half of the outputs whose gradients are all 0 while those of the other half are not: 0, 1, or -1."""
    from proctor.instrument.observe.content import readable, unseen

    if readable(grad) is not grad or grad is None:  # its operations would run the program's
        return -1
    with unseen():
        n = grad.shape[0] // 2
        used = grad.detach().reshape(grad.shape[0], -1).any(1)
        parts = [float(used[:n].float().mean()), float(used[n:].float().mean())]
    return next((i for i in (0, 1) if parts[i] == 0 and parts[1 - i] >= _USED), -1)
