"""Which modules run now, and how often each was called in this step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from proctor.oracle.collect.taps import recomputing


class Place(NamedTuple):
    """A module that runs: its canonical name and call, and whether it is computed again in a backward pass."""

    name: str
    call: int
    again: bool


class Running:
    """The calls of watched modules.

    Attributes:
        stack: those that have not returned, the innermost last.
        depth: of calls that are not computed again.
    """

    def __init__(self) -> None:
        self.stack: list[Place] = []
        self.depth = 0
        self._calls: dict[str, int] = {}
        self._recomputes: dict[str, int] = {}

    def enter(self, name: str, key: str) -> Place | None:
        """A module is called.

        Args:
            name: of the module.
            key: under which its calls are counted.

        Returns:
            its call; `None` in an evaluation.
        """
        again = recomputing()
        counts = self._recomputes if again else self._calls
        call = counts.get(key, 0)
        if not self.depth and not torch.is_grad_enabled() and not again:
            return None
        counts[key] = call + 1
        if not again:  # checkpointing ends a recomputation by an exception: its calls never leave
            self.stack[:] = [place for place in self.stack if not place.again]
            self.depth += 1
        self.stack.append(Place(name, call, again))
        return self.stack[-1]

    def leave(self, name: str) -> Place | None:
        """A module returns; `None` if it was never entered."""
        while self.stack and self.stack[-1].name != name:
            self.depth -= not self.stack.pop().again  # a call that an exception ended
        if not self.stack:
            return None
        place = self.stack.pop()
        self.depth -= not place.again
        return place

    def innermost(self) -> Place | None:
        """The innermost module that runs; of those that are computed again, only while a backward pass is running."""
        if not self.stack or self.stack[-1].again != recomputing():
            return None
        return self.stack[-1]

    def all(self) -> list[Place]:
        """Those that run, the outermost first; none where `innermost` has none."""
        return [place for place in self.stack if place.again == self.stack[-1].again] if self.innermost() is not None else []

    def abandon(self) -> None:
        """An outermost call was ended by an exception, which the program may catch: nothing runs."""
        self.stack.clear()
        self.depth = 0

    def next_step(self) -> None:
        """Calls are counted by step."""
        self._calls, self._recomputes = {}, {}
