"""Whether parts of a model that get gradients are forgotten by the optimizers.

A row of `Value.KEPT`, `forgotten`, once in a run, at an early update: parameters of a module that also has parameters which an optimizer holds. They are in no optimizer, have had gradients at several updates that nothing
clears, have not moved, and were not loaded: no `load_state_dict` of a module put them there, no file was read that none has taken since, and no library's modules are a part of it. So they stay as they began, at random. So are all parameters of a model that lies in front of another one which trains: what it gives of data alone is what the other is given; and those that a loss of the program's has of its own (a scale, centres) and is not a layer of, where a model that trains makes what it is given. Fine-tuning that leaves out what was loaded is none, nor are a model beside or behind what trains (a teacher, a loss), a part that is
given to an optimizer later, parameters that the program moves itself, and gradients that are cleared: who clears them knows of them.
Cost: a look at the parameters of the models at two updates, at the graphs of what models are given in the first steps, and at the candidates' gradients in between.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import no_torch_function
from proctor.instrument.observe.modules import living
from proctor.instrument.observe.plainly import is_tensor
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._held import Optimizers, is_plain, telling
from proctor.instrument.probes.graphs import BACKWARD, nodes
from proctor.invariants.schema import MODEL_CALL, Value

MADE: Final = "torch.optim.Optimizer.__init__"
TAKES: Final = "torch.nn.Module.load_state_dict"
READS: Final = "torch.load"
_UPDATE: Final = "torch.optim.Optimizer.step"
_FIRST, _LAST = 2, 16  # updates at which parameters are looked at
_MODELS: Final = 64
_PARAMETERS: Final = 4096
_OPTIMIZERS: Final = 64


@register
class Loose(Probe):
    """Parameters that nobody holds."""

    name = "loose"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._updates = 0
        self._models: dict[int, weakref.ref[Any]] = {}
        self._fed: dict[int, set[int]] = {}  # of these, those that are given what others made: parameters that it was made with
        self._optimizers = Optimizers(_OPTIMIZERS)
        self._loose: list[tuple[weakref.ref[Any], list[float]]] = []
        self._loaded: set[int] = set()  # parameters
        self._read = 0  # files that no module has taken yet: the program may have put them anywhere

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if function == READS:
            return self._reads, None
        if function == TAKES:
            return None, lambda args, kwargs, result, raised: self._takes(args[0])
        if function == BACKWARD:
            return self._backward, None
        if function == MADE:
            return None, lambda args, kwargs, result, raised: self._know(args[0])
        return (self._steps, None) if function == _UPDATE else NO_HOOKS

    def thinned(self) -> None:
        self._ends()

    def _ends(self) -> None:
        self.over, self._loose, self._models, self._fed, self._loaded = True, [], {}, {}, set()

    def _reads(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._read += 1

    def _takes(self, module: Any) -> None:
        if not self.over:
            self._read = max(0, self._read - 1)
            self._loaded |= {id(p) for p in plainly.parameters(module)}
            if len(self._loaded) > _PARAMETERS:
                self._ends()

    def _know(self, optimizer: Any) -> None:
        if not self.over and not self._optimizers.know(optimizer):
            self._ends()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self.over and self._updates <= _FIRST and args[0].training and len(self._models) < _MODELS:
            self._models.setdefault(id(args[0]), weakref.ref(args[0]))
            if id(args[0]) not in self._fed and (made := _made_with((*args[1:], *(kwargs or {}).values()))):
                self._fed[id(args[0])] = made

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """What has no gradient when a backward begins was cleared."""
        if self._loose:
            grads = self.sink.gradients(p for ref, _ in self._loose if (p := ref()) is not None)
            if grads is None or len(grads) < len(self._loose) or any(grad is None for grad in grads):
                self._ends()

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.over:
            return
        self._know(args[0])
        self._updates += 1
        if self._read and self._updates in (_FIRST, _LAST):
            self._ends()
        elif self._updates == _FIRST:
            called = [model for ref in self._models.values() if (model := ref()) is not None]
            every = {id(p): p for model in called for p in plainly.parameters(model) if p.requires_grad and is_plain(p)}
            held = self._optimizers.held()
            loose = [p for key, p in every.items() if key not in held and key not in self._loaded][:_PARAMETERS]
            self._loose = [(TensorRef(p), telling(p)) for p in self._pushed(loose)]
            if not self._loose:
                self._ends()
        elif self._updates == _LAST:
            self._tell()
            self._ends()

    def _pushed(self, parameters: list[Any]) -> list[Any]:
        """Those that have a gradient which is not 0."""
        grads = self.sink.gradients(parameters) or [None] * len(parameters)
        return [p for p, grad in zip(parameters, grads) if grad is not None and bool(grad.detach().any())]

    def _tell(self) -> None:
        held = self._optimizers.held()
        known = [(p, told) for ref, told in self._loose if (p := ref()) is not None and id(p) not in self._loaded]
        still = [p for p, told in known if id(p) not in held and p.requires_grad and telling(p) == told]
        loose = {id(p) for p in self._pushed(still)}
        for owner in _modules() if loose else ():
            named = list(plainly.named_parameters(owner))
            first = next((i for i, (_, p) in enumerate(named) if id(p) in held), len(named))
            behind = [name for name, p in named[first:] if id(p) in loose]
            judges = False
            if named and all(id(p) in loose for _, p in named):
                judges = self._judges(owner, held)
                behind = [name for name, _ in named] if judges or self._in_front(owner, held) else behind
            if behind and not any(_of_a_library(part) for part in plainly.modules(owner)):
                more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
                what = "this loss has of its own" if judges else "began at random"
                seen = f"{behind[0]}{more} of {_name(owner)}: no optimizer holds what {what} and gets gradients{',' if not judges else ''} which pile up since nothing clears them"
                self.sink.number(behind[0], float(len(behind)), kind=Value.KEPT, facts={"what": "forgotten", "seen": seen})
                return

    def _judges(self, owner: Any, held: set[int]) -> bool:
        """Whether this is a module of the program's that has parameters and no layers, and is given what a model makes that an optimizer holds."""
        layers = any(module._parameters for module in plainly.modules(owner) if module is not owner)
        known = self._models.get(id(owner))
        if layers or known is None or known() is not owner or type(owner).__module__.partition(".")[0] == "torch":
            return False
        return bool(self._fed.get(id(owner), set()) & held)

    def _in_front(self, owner: Any, held: set[int]) -> bool:
        """Whether this is a model that was given data alone, and what it gives is given to one that an optimizer holds."""
        mine = {id(p) for p in plainly.parameters(owner)}
        known = self._models.get(id(owner))
        if known is None or known() is not owner or id(owner) in self._fed:
            return False
        others = [ref for key, ref in self._models.items() if self._fed.get(key, set()) & mine]
        return any(id(p) in held for ref in others if (model := ref()) is not None for p in plainly.parameters(model))


def _made_with(given: tuple[Any, ...]) -> set[int]:
    """Parameters behind what a model is given, by their ids."""
    tensors = [value for one in given for value in (one if type(one) in (list, tuple) else (one,))]
    with no_torch_function():
        roots = [node for value in tensors if is_tensor(value) and (node := value.grad_fn) is not None]
    return {id(variable) for node in (nodes(roots) or () if roots else ()) if (variable := getattr(node, "variable", None)) is not None}


def _modules() -> list[Any]:
    """All modules that live, by the number of their parts, the fewest first."""
    return sorted(living(), key=lambda module: sum(1 for _ in plainly.modules(module)))


def _of_a_library(module: Any) -> bool:
    """Whether this module's class is of an installed package, but torch's own: it may have been given its values by ways of that package."""
    home = type(module).__module__
    file = getattr(sys.modules.get(home), "__file__", None)
    return home.partition(".")[0] != "torch" and isinstance(file, str) and os.path.abspath(file).startswith(library_prefixes())


def _name(module: Any) -> str:
    return str(getattr(module, "original_name", "") or type(module).__name__)
