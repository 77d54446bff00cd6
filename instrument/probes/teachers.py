"""Whether a model that was loaded and that nothing trains is asked in evaluation mode: a teacher, a reference, a reward model.

A row of `Value.KEPT`, `teacher`, once in a run: a model was called in training mode at several updates, and something in it depends on the mode (a dropout drops out, a
batch norm normalises by the batch and moves its statistics). All of its parameters were put there by `load_state_dict`, no optimizer holds one of them, and they have not moved. Nobody has set its mode, or that of
a part of it or of a model around it: it is in the mode in which modules are made. So who trains a model, sets its mode, or calls it without a mode that matters is not spoken of, nor are a copy of a model that
trains (a target, an average: a model of the same class with parameters of the same shapes), a model that began at random (a target of random distillation), and an evaluation, in which no update happens.
Cost: a look-up at each call of a model until the sixth update with one that was loaded, and one walk over it then.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.modules import class_name, living, unwrap
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._held import Optimizers, is_plain, telling
from proctor.instrument.probes.loose import MADE, TAKES
from proctor.invariants.schema import MODEL_CALL, Value

TRAIN: Final = "torch.nn.Module.train"
_UPDATE: Final = "torch.optim.Optimizer.step"
_CALLS: Final = 6  # at as many updates
_LAST: Final = 4096  # the last update at which models are looked at
_MODELS: Final = 64
_OPTIMIZERS: Final = 64
_MODULES: Final = 65_536
_TOLD: Final = 8  # parameters that tell whether a model moves


@dataclass
class _Called:
    """A model that was loaded, and the updates at which it was called in training mode."""

    model: weakref.ref[Any]
    moves: list[list[float]]
    update: int
    times: int = 1


@register
class Teachers(Probe):
    """Loaded models in the mode in which they were made."""

    name = "teachers"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._updates = 0
        self._set: set[int] = set()  # ids of modules whose mode was set
        self._loaded: dict[int, weakref.ref[Any]] = {}  # parameters, by id: another one may have it later
        self._known: dict[int, _Called | None] = {}  # by the model's id; None: not all of it was loaded
        self._optimizers = Optimizers(_OPTIMIZERS)

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if function == TRAIN:  # which `eval` calls, too, and which calls itself on every part
            return self._sets, None
        if function == TAKES:
            return None, lambda args, kwargs, result, raised: self._takes(args[0])
        if function == MADE:
            return None, lambda args, kwargs, result, raised: self._know(args[0])
        return (self._steps, None) if function == _UPDATE else NO_HOOKS

    def thinned(self) -> None:
        self._ends()

    def _ends(self) -> None:
        self.over, self._set, self._loaded, self._known = True, set(), {}, {}

    def _sets(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self.over:
            self._set.add(id(args[0]))
            if len(self._set) > _MODULES:
                self._ends()

    def _takes(self, module: Any) -> None:
        if not self.over:
            self._loaded |= {id(p): TensorRef(p) for p in plainly.parameters(module)}
            self._known = {key: known for key, known in self._known.items() if known is not None}
            if len(self._loaded) > _MODULES:
                self._ends()

    def _know(self, optimizer: Any) -> None:
        if not self.over and not self._optimizers.know(optimizer):
            self._ends()

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self.over:
            self._know(args[0])
            self._updates += 1
            if self._updates > _LAST:
                self._ends()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        model = args[0]
        if self.over or not self._loaded or not model.training:
            return
        known = self._known.get(id(model))
        if known is None or known.model() is not model:
            if id(model) not in self._known or known is not None:
                self._meet(model)
        elif known.update < self._updates:
            known.update, known.times = self._updates, known.times + 1
            if known.times == _CALLS:
                self._judge(model, known)

    def _meet(self, model: Any) -> None:
        if len(self._known) >= _MODELS:
            return
        parameters = list(plainly.parameters(model))
        loaded = bool(parameters) and all((ref := self._loaded.get(id(p))) is not None and ref() is p and is_plain(p) for p in parameters)
        moves = [telling(p) for p in parameters[:_TOLD]] if loaded else []
        self._known[id(model)] = _Called(weakref.ref(model), moves, self._updates) if loaded else None

    def _judge(self, model: Any, known: _Called) -> None:
        parameters = list(plainly.parameters(model))
        held = self._optimizers.held()
        if any(id(p) in held for p in parameters) or [telling(p) for p in parameters[:_TOLD]] != known.moves:
            return
        if any(id(module) in self._set for module in plainly.modules(model)):
            return
        path, part, does = next(((path, m, does) for path, m in plainly.named_modules(model) if (does := _depends(m))), ("", None, ""))
        if part is None or any(_alike(module, model, held) for module in living()):
            return
        name = class_name(unwrap(model)[0]).rpartition(".")[2]
        seen = f"{path or name} ({type(part).__name__}) {does}: {name} was loaded, nothing trains it, and nobody has set its mode"
        self.sink.number(path, 1.0, kind=Value.KEPT, facts={"what": "teacher", "seen": seen})
        self._ends()


def _depends(module: Any) -> str:
    """What a module does in training mode that it does not in evaluation, "" if nothing."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    if not module.training:
        return ""
    if isinstance(module, _BatchNorm) and module.track_running_stats:
        return "normalises by the batch and moves its statistics"
    return "drops out" if isinstance(module, _DropoutNd) and module.p > 0 else ""


def _alike(module: Any, model: Any, held: set[int]) -> bool:
    """Whether this trains and is made like the model."""
    if type(module) is not type(model) or module is model:
        return False
    parameters = list(plainly.parameters(module))
    return any(id(p) in held for p in parameters) and [p.shape for p in parameters] == [p.shape for p in plainly.parameters(model)]
