"""Finds the tensors that a backward gives gradients to, for `steps.py`: in a program without an optimizer they are what it trains.

A program may also make new tensors in each step and train on with these (`params = [p - rate * g for …]`). `Lineage` tells the
successors of what was trained from other tensors of the same shapes, such as the next batch of an attack on inputs.
"""

from __future__ import annotations

import math
import sys
import weakref
from types import FrameType
from typing import Any, Final

from proctor.instrument.observe.refs import TensorRef

_MAX_NODES = 20_000  # of a graph that are looked at
_ELEMENTS: Final = 64
_NEAR: Final = 0.5  # of their norm that the tensors may move in one step
_LINEAGES: Final = 8


def leaves_of(args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Name and tensor of each leaf of the graph below these outputs, in the order in which the graph reaches them.

    A leaf is called what a module on the stack calls it, or `leaf.<i>`.

    Args:
        args: what `backward` was given; the first is a tensor, or several.
    """
    import torch

    outputs = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    seen: set[Any] = set()
    found: dict[int, Any] = {}
    with torch._C.DisableTorchFunction():
        waiting = [fn for fn in (getattr(out, "grad_fn", None) for out in reversed(outputs)) if fn is not None]
        while waiting and len(seen) < _MAX_NODES:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                found.setdefault(id(node.variable), node.variable)
            waiting.extend(following for following, _ in reversed(node.next_functions) if following is not None)
    names = _names(found)
    return [(names.get(key, f"leaf.{i}"), leaf) for i, (key, leaf) in enumerate(found.items())]


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """As `leaves_of`, of what `torch.autograd.grad` is asked to differentiate by; of a function transform, what that wraps."""
    import torch

    asked = args[1] if len(args) > 1 else (kwargs or {}).get("inputs", ())
    found: list[Any] = []
    with torch._C.DisableTorchFunction():
        for tensor in asked if isinstance(asked, list | tuple) else (asked,):
            while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            if isinstance(tensor, torch.Tensor):
                found.append(tensor)
    names = _names({id(tensor): tensor for tensor in found})
    return [(names.get(id(tensor), f"leaf.{i}"), tensor) for i, tensor in enumerate(found)]


class Lineage:
    """What was trained last, and whether other tensors have taken its place."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], tuple[list[int], list[list[float]], list[weakref.ref[Any]]]] = {}  # by shapes: identities, some elements, parameters
        self.followed = False  # once: this program trains by making new tensors

    def follow(self, leaves: list[tuple[str, Any]]) -> list[int]:
        """Identities of the tensors whose place these have taken; none where they are the same ones, or others.

        Successors have the shapes of what was there before and values near to it: an update is small against the weights, another
        batch is not. Parameters do not take the place of parameters that are still there: these are two models, such as a copy beside its original.
        """
        tensors = [tensor for _, tensor in leaves]
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        if not tensors or sum(t.device.type == "cpu" for t in tensors) < len(tensors):
            return []  # to read elements of a device would wait for it
        now = [id(t) for t in tensors], [_some(t) for t in tensors], _parameters(tensors)
        before = self._last.pop(shapes, None)
        self._last[shapes] = now
        while len(self._last) > _LINEAGES:
            del self._last[next(iter(self._last))]
        if before is None or before[0] == now[0]:
            return []
        if now[2] and before[2] and all(ref() is not None for ref in before[2]):
            return []
        old, new = ([v for values in some for v in values] for some in (before[1], now[1]))
        follows = 0 < _norm([a - b for a, b in zip(new, old)]) <= _NEAR * _norm(old)
        self.followed |= follows
        return before[0] if follows else []


def _parameters(tensors: list[Any]) -> list[weakref.ref[Any]]:
    """All of them, where all are parameters; else none."""
    import torch

    return [TensorRef(t) for t in tensors] if all(isinstance(t, torch.nn.Parameter) for t in tensors) else []


def _some(tensor: Any) -> list[float]:
    """A few elements, spread over the tensor."""
    import torch

    with torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS]
        return [float(abs(v)) if isinstance(v, complex) else float(v) for v in chosen.tolist()]


def _norm(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values))


def _names(wanted: dict[int, Any]) -> dict[int, str]:
    """What modules whose code is on the stack call these tensors.

    Locals of functions are not asked: that would keep what they hold alive until the function returns.
    """
    names: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(names) < len(wanted):
        place = str(frame.f_globals.get("__name__", ""))
        if place.partition(".")[0] not in ("torch", "proctor"):
            for name, value in list(frame.f_globals.items()):
                if id(value) in wanted:
                    names.setdefault(id(value), name)
        frame = frame.f_back
    return names
