"""Finds the tensors that a backward gives gradients to, for `steps.py`: in a program without an optimizer they are what it trains."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_MAX_NODES = 20_000  # of a graph that are looked at


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
