"""Copies of several models beside each other: read by `averages`, at one step of a run.

`alike`: a program that keeps copies of two models it trains, as the targets of an actor and of a critic, uses both in one way. Told is a copy that is called, and never moves, while another one moves; and a copy that
moves in the same steps and at the same rate as another one, and is never called, while the other one is. One copy alone says nothing: a reference rests, and an average for later is called by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes._copies import Copy

AT: Final = 40  # the step before which it is asked
_LEAST: Final = 8  # moves, fewer show no manner
_NEAR: Final = 0.01  # between two rates, as a share of them


class Use:
    """What happened to one copy so far."""

    def __init__(self, copy: Copy) -> None:
        self._modules = copy.modules
        self.calls = self.learned = 0  # calls of the copy, and steps in which its model moved
        self.moved: list[int] = []  # steps
        self.rates: list[float] = []

    def steps(self, step: int, *, moved: bool, learned: bool, rate: float) -> None:
        """A step is over."""
        self.learned += learned
        if moved:
            self.moved.append(step)
            self.rates.append(rate)

    def model(self) -> Any:
        return None if self._modules is None else self._modules[1]()

    def name(self) -> str:
        return class_name(self.model()).rpartition(".")[2]


def odd(uses: Sequence[Use]) -> list[tuple[str, str]]:
    """The class of each copy of a model that is used in another way than one beside it, and in which."""
    known = [use for use in uses if use.model() is not None]
    followed = [use for use in known if len(use.moved) >= _LEAST and use.calls >= _LEAST]
    found = []
    for use in known:
        others = [other for other in followed if other.model() is not use.model()]
        if use.calls >= _LEAST and not use.moved and use.learned >= _LEAST and others:
            found.append((use.name(), f"the copy of {use.name()} is called and never moves, while {use.name()} trains and the copy of {others[0].name()} follows it"))
        elif not use.calls and any(use.moved == other.moved and _equal(use.rates, other.rates) for other in others):
            found.append((use.name(), f"the copy of {use.name()} follows it and is never called, while the copy of {others[0].name()} is"))
    return found


def _equal(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) >= _LEAST and all(abs(a - b) <= _NEAR * max(abs(a), abs(b)) for a, b in zip(some, others, strict=True))
