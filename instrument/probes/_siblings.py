"""Copies of several models beside each other: read by `averages`, at one step of a run.

`alike`: a program that keeps copies of two models it trains, as the targets of an actor and of a critic, uses both in one way. Told is a copy that is called, and never moves, while another one, which is called right
behind it (a critic's target is given what the actor's chose), moves; and a copy that moves in the same steps and at the same rate as another one, and is never called, while the other one is. One copy alone says nothing: a reference rests, and an average for
later is called by nobody; nor does a resting one of a model that has a moving one, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes._copies import Copy

AT: Final = 40  # the step before which it is asked
_LEAST: Final = 8  # moves, fewer show no manner
_LIKE: Final = 0.95  # the cosine of a copy and its model where it is found: it began as the model, which a few updates have moved
_NEAR: Final = 0.05  # between two rates, as a share of them


class Use:
    """What happened to one copy so far."""

    def __init__(self, copy: Copy) -> None:
        self._modules = copy.modules
        self.began = -1  # the step that it is followed from
        self.alike = False  # it began as its model
        self.calls = self.learned = 0  # calls of the copy, and steps in which its model moved
        self.behind: Counter[int] = Counter()  # of these calls, those right behind a call of another copy, by its id
        self.moved: list[int] = []  # steps
        self.rates: list[float] = []

    def begins(self, step: int, copy: Sequence[float], model: Sequence[float]) -> None:
        """The copy was found."""
        if self.began < 0:
            length = math.hypot(*copy) * math.hypot(*model)
            self.began, self.alike = step, bool(length) and sum(a * b for a, b in zip(copy, model)) > _LIKE * length

    def called(self, before: Use | None) -> None:
        """The copy is called, and `before` was called last."""
        self.calls += 1
        if before is not None and before is not self:
            self.behind[id(before)] += 1

    def steps(self, step: int, *, moved: bool, learned: bool, rate: float) -> None:
        """A step is over."""
        self.learned += learned
        if moved:
            self.moved.append(step)
            self.rates.append(rate)

    def model(self) -> Any:
        return None if self._modules is None else self._modules[1]()

    def kind(self) -> str:
        return class_name(self.model())

    def name(self) -> str:
        return self.kind().rpartition(".")[2]

    def moves(self, begin: int) -> tuple[list[int], list[float]]:
        """The steps from `begin` on in which it moved, and the rates."""
        found = [(step, rate) for step, rate in zip(self.moved, self.rates) if step > begin]
        return [step for step, _ in found], [rate for _, rate in found]


def odd(uses: Sequence[Use]) -> list[tuple[str, str]]:
    """The class of each copy of a model that is used in another way than one beside it, and in which."""
    known = [use for use in uses if use.model() is not None and use.alike and not use.kind().startswith("torch.")]
    followed = [use for use in known if len(use.moved) >= _LEAST and use.calls >= _LEAST]
    found = []
    for use in known:
        others = [other for other in followed if other.model() is not use.model()]
        rests = use.calls >= _LEAST and not use.moved and use.learned >= _LEAST and not any(other.moved for other in known if other.model() is use.model())
        led = [other for other in others if rests and other.behind[id(use)] >= _LEAST]
        if led:
            found.append((use.name(), f"the copy of {use.name()} is called and never moves, while {use.name()} trains and the copy of {led[0].name()}, which is called behind it, moves"))
        elif not use.calls and any(_together(use, other) for other in others):
            found.append((use.name(), f"the copy of {use.name()} follows it and is never called, while the copy of {others[0].name()} is"))
    return found


def _together(one: Use, other: Use) -> bool:
    """Whether two copies move in the same steps and at one rate; in single steps, rounding hides it while a copy lies near its model."""
    begin = max(one.began, other.began)
    (steps, rates), (others, its) = one.moves(begin), other.moves(begin)
    return len(steps) >= _LEAST and steps == others and abs((a := median(rates)) - (b := median(its))) <= _NEAR * max(abs(a), abs(b))
