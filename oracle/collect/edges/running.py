"""Which modules run now, and how often each was called in this step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from proctor.oracle.collect.edges.taps import recomputing


class Place(NamedTuple):
    """A module that runs: its canonical name and call, whether it is computed again in a backward pass, and whether it evaluates."""

    name: str
    call: int
    again: bool
    evaluation: bool = False


class Running:
    """The calls of watched modules.

    Args:
        training: forwards with gradients are no evaluations.

    Attributes:
        stack: those that have not returned, the innermost last.
        depth: of calls that are not computed again.
        evaluating: the outermost one runs without gradients.
        evaluated: how often each module was called so in this step, by key.
        forwards: how many of those were outermost.
    """

    def __init__(self, *, training: bool = True) -> None:
        self._training = training
        self.stack: list[Place] = []
        self.depth = 0
        self.evaluating = False
        self.evaluated: dict[str, int] = {}
        self.forwards = 0
        self._calls: dict[str, int] = {}
        self._recomputes: dict[str, int] = {}

    def enter(self, name: str, key: str) -> Place:
        """A module is called.

        Args:
            name: of the module.
            key: under which its calls are counted.

        Returns:
            its call, counted by itself in an evaluation.
        """
        again = recomputing()
        if not self.depth and not again:
            self.evaluating = not (self._training and torch.is_grad_enabled())
            self.forwards += self.evaluating
        counts = self._recomputes if again else self.evaluated if self.evaluating else self._calls
        call = counts.get(key, 0)
        counts[key] = call + 1
        if not again:  # checkpointing ends a recomputation by an exception: its calls never leave
            self.stack[:] = [place for place in self.stack if not place.again]
            self.depth += 1
        self.stack.append(Place(name, call, again, self.evaluating and not again))
        return self.stack[-1]

    def leave(self, name: str) -> Place | None:
        """A module returns; `None` if it was never entered."""
        while self.stack and self.stack[-1].name != name:
            self.depth -= not self.stack.pop().again  # a call that an exception ended
        if not self.stack:
            return None
        place = self.stack.pop()
        self.depth -= not place.again
        self.evaluating = self.evaluating and self.depth > 0
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
        self.evaluating = False

    def next_step(self) -> None:
        """Calls are counted by step."""
        self._calls, self._recomputes, self.evaluated, self.forwards = {}, {}, {}, 0
