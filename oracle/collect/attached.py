"""What is put into a process, so that all of it can be taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Attached:
    """Wrapped functions, hooks and the like, in the order in which they came."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have calls of an attribute go through a function, but for those that dynamo traces.

        Args:
            owner: a class or a module.
            name: of the attribute.
            around: is called with the original and its arguments.
        """
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is not wrapper:
                return
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def hold(self, *undo: Callable[[], None]) -> None:
        """Remember what takes other things off."""
        self._undo += undo

    def remove(self) -> None:
        """Take everything off, the last first."""
        while self._undo:
            self._undo.pop()()
