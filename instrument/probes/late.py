"""Whether a term is added to a loss when its backward is over.

A row of `Value.KEPT`, `late`, once for a variable: a backward began at what a variable of the program's function held; when an optimizer steps, that function still runs, and the variable holds the same loss with something added
(or multiplied) that depends on parameters and that no backward began at: what was added is printed, and trains nothing. A sum of losses that had backwards of their own is none, nor is one that another backward
follows, what is added behind the update, or a number that goes over several batches. Told when it is seen a second time; only in the first steps. Cost: a walk up the frames at each backward and each update, and 1 µs a node of what was added.
"""

from __future__ import annotations

import sys
import types
from typing import Any, Final

from proctor.instrument.observe.plainly import held
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes._looks import whose
from proctor.instrument.probes.graphs import BACKWARD, kind_of, losses
from proctor.instrument.probes.source import reading
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_FRAMES: Final = 24
_NODES: Final = 20_000
_BEGUN: Final = 16  # backwards between two updates
_TWICE: Final = 2
_Node = tuple[int, str]  # its number among all that were made, and its kind: nothing of the graph is held


@register
class Late(EarlyProbe):
    """Terms that no backward sees."""

    name = "late"
    kinds = frozenset({Value.KEPT})
    looks = 16

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._begun: set[_Node] = set()  # where backwards began since the last update
        self._held: dict[tuple[types.CodeType, str], _Node] = {}  # variables that held one of them
        self._times: dict[str, int] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return {BACKWARD: (self._backward, None), _UPDATE: (self._steps, self._stepped)}.get(function, NO_HOOKS)

    def thinned(self) -> None:
        self.left, self.over = 0, True

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0 or len(self._begun) >= _BEGUN:
            return
        roots = [t for t in losses(args, kwargs) if _plain(t)]
        self._begun.update(_number(t.grad_fn) for t in roots)
        if len(roots) == 1:
            for code, name, value in _variables():
                if value is roots[0]:
                    self._held[code, name] = _number(roots[0].grad_fn)

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left <= 0 or not self._held:
            return
        self.left -= 1
        for code, name, value in _variables():
            began = self._held.get((code, name))
            if began is not None and _plain(value) and _number(value.grad_fn) not in self._begun and _added(value.grad_fn, began, self._begun):
                self._times[name] = self._times.get(name, 0) + 1
                if self._times[name] == _TWICE:
                    seen = f"something that depends on parameters is added to {name} between its backward and the update, and no backward begins at it: it trains nothing"
                    self.sink.number(name, float(_TWICE), kind=Value.KEPT, facts={"what": "late", "seen": seen})
                return

    def _stepped(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._begun, self._held = set(), {}


def _variables() -> list[tuple[types.CodeType, str, Any]]:
    """Losses that variables of the program's functions hold, and attributes of their objects, of those that run now."""
    found: list[tuple[types.CodeType, str, Any]] = []
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if whose(frame.f_code, frame.f_globals) == "user":
            scope = reading.scope_of(frame)
            try:
                found += [(frame.f_code, name, value) for name, value in scope.items() if _plain(value)]
                if "self" in scope:
                    found += [(frame.f_code, f"self.{name}", value) for name, value in held(scope["self"]).items() if _plain(value)]
            finally:
                reading.release(frame, scope)
        frame = frame.f_back
    return found


def _plain(value: Any) -> bool:
    """Whether this is a loss: one number that depends on parameters."""
    import torch

    return type(value) is torch.Tensor and value.dim() == 0 and value.grad_fn is not None


def _number(node: Any) -> _Node:
    return int(node._sequence_nr()), kind_of(node)


def _added(node: Any, began: _Node, begun: set[_Node]) -> bool:
    """Whether this is made of what a backward began at, and of something else that depends on parameters."""
    found, seen, old, other = [node], {node}, False, False
    for one in found:
        if len(seen) > _NODES:
            return False
        number = _number(one)
        if number in begun:
            old = old or number == began
            continue  # what lies behind has had its backward
        other = other or kind_of(one) == "AccumulateGrad"
        fresh = [following for following, _ in one.next_functions if following is not None and following not in seen]
        found += dict.fromkeys(fresh)
        seen.update(fresh)
    return old and other
