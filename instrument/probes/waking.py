"""Whether frozen parts that were set to evaluate before the training still do when the model trains.

Rows of `Value.KEPT`, `woken`: a module without parameters that train, with batch norms in it, was set to evaluate by itself, and its batch norms train in a training forward of
the model, since `train()` of the model reaches all of it; or a batch norm was, whose parameters may train. Who calls `train()` of the module itself, or sets it to evaluate between training forwards (for an
evaluation), is not spoken of. Cost: a walk over such modules in four forwards of each model.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import MODEL_CALL, Value

_EVAL: Final = "torch.nn.Module.eval"
_TRAIN: Final = "torch.nn.Module.train"
_KNOWN: Final = 64
_LOOKS: Final = 4  # of one model
_MODELS: Final = 8


@register
class Waking(Probe):
    """Frozen parts that train."""

    name = "waking"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: dict[int, weakref.ref[Any]] = {}
        self._looks: dict[int, int] = {}
        self._depth = 0  # of `train` in `train`, which calls itself on every child
        self._trained: set[int] = set()  # ids of modules that were in a training forward

    def hooks(self, function: str, home: Home) -> Hooks:
        return {_EVAL: (None, self._evaluates), _TRAIN: (self._trains, self._trained_all), MODEL_CALL: (self._called, None)}.get(function, NO_HOOKS)

    def _evaluates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        module = args[0]
        if len(self._known) < _KNOWN and id(module) not in self._trained and _meant(module) and _norms(module):
            self._known[id(module)] = weakref.ref(module)

    def _trains(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._depth += 1
        mode = args[1] if len(args) > 1 else (kwargs or {}).get("mode", True)
        known = self._known.get(id(args[0]))
        if self._depth == 1 and mode and known is not None and known() is args[0]:
            del self._known[id(args[0])]

    def _trained_all(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._depth = max(0, self._depth - 1)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        root = args[0]
        if not root.training or not torch.is_grad_enabled():
            return
        looks = self._looks.get(id(root), 0)
        if looks >= _LOOKS or (not looks and len(self._looks) >= _MODELS):
            return
        if next(plainly.parameters(root), None) is None:  # augmentations and losses are modules, too
            return
        self._looks[id(root)] = looks + 1
        paths = {id(m): path for path, m in plainly.named_modules(root)}
        if not looks:
            self._trained.update(paths)
        mine = [m for key, ref in self._known.items() if (m := ref()) is not None and key in paths and paths[key] and _meant(m)]
        awake = [(m, norm) for m in mine if (norm := next((n for n in _norms(m) if n.training), None)) is not None]
        if not mine:
            return
        seen = ""
        if awake:
            part, norm = awake[0]
            seen = f"{paths[id(norm)]} ({type(norm).__name__}) trains: {paths[id(part)]} {'is frozen and' if _frozen(part) else 'itself'} was set to evaluate, and train() of the model has reached it since"
        self.sink.number(paths[id(awake[0][1])] if awake else paths[id(mine[0])], float(len(awake)), kind=Value.KEPT, facts={"what": "woken", "seen": seen})


def _meant(module: Any) -> bool:
    """Whether who sets this module to evaluate, by itself, means it to stay so: a part that is frozen, or a batch norm, since `eval()` of a model does not call that of its parts."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return isinstance(module, _BatchNorm) or _frozen(module)


def _frozen(module: Any) -> bool:
    return not any(p.requires_grad for p in plainly.parameters(module))


def _norms(module: Any) -> list[Any]:
    """Batch norms in a module that keep statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [m for m in plainly.modules(module) if isinstance(m, _BatchNorm) and m.track_running_stats]
