"""What was put in the place of other things, so that all of it can be taken off again.

Used by the observer's taps (`patches.py`), by the oracle's collector and by the self-check. What the user, or another tool, has
replaced after us is left alone on removal: putting our original back would undo their patch.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISSING = object()


@dataclass(frozen=True, slots=True)
class Replacement:
    """An object of ours that stands as an attribute of an owner; calling it puts the original back."""

    owner: Any
    attribute: str
    original: Any  # or MISSING: the owner had none of its own
    ours: Any

    def __call__(self) -> None:
        if vars(self.owner).get(self.attribute) is not self.ours:
            return
        if self.original is MISSING:
            delattr(self.owner, self.attribute)
        else:
            _put(self.owner, self.attribute, self.original)


class Replaced:
    """Replaced attributes, hooks and the like, in the order in which they came."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, attribute: str, ours: Any) -> None:
        """Put an object of ours in a place, to be restored later."""
        original = vars(owner).get(attribute, MISSING)
        _put(owner, attribute, ours)
        self._undo.append(Replacement(owner, attribute, original, ours))

    def wrap(self, owner: Any, attribute: str, around: Callable[..., Any]) -> None:
        """Have calls of an attribute go through a function, but for those that dynamo or `torch.jit.trace` follows.

        Args:
            owner: a class or a module.
            attribute: of it, or of a base.
            around: is called with the original and its arguments.
        """
        import torch

        original, compiling, tracing = getattr(owner, attribute), torch.compiler.is_compiling, torch._C._is_tracing

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if compiling() or tracing():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self.replace(owner, attribute, wrapper)

    def hold(self, *undo: Callable[[], None]) -> None:
        """Remember what takes other things off."""
        self._undo += undo

    def remove(self) -> None:
        """Take everything off, the last first."""
        while self._undo:
            self._undo.pop()()

    def __len__(self) -> int:
        return len(self._undo)


def _put(owner: Any, attribute: str, value: Any) -> None:
    """Set an attribute, also one that a class written in C has and keeps from being set (in that case `value` takes its place)."""
    try:
        setattr(owner, attribute, value)
    except TypeError:
        if not isinstance(owner, type) or attribute not in vars(owner):
            raise
        (behind,) = gc.get_referents(vars(owner))  # the dictionary that `vars` shows and does not let write
        behind[attribute] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
