"""A glance at a few parameters in each step that a budget leaves out: what is wrong with them brings the full look back.

It gives no verdict and writes no record: that a value is not finite, or that a parameter with a gradient was not moved since the last glance, is
a reason to look at the next steps in full, where the rules judge. The parameters take turns, and as many come in a step as the budget allows.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.observe.fingerprint import fingerprint_all
from proctor.invariants.schema import StateFlag

if TYPE_CHECKING:
    from proctor.instrument.budget import Budget
    from proctor.instrument.observe.state import StateTracker

_MOST: Final = 256  # parameters of one glance
_RARELY: Final = 16  # steps between two glances, at most
_BAD: Final = int(StateFlag.NONFINITE)


class Sentinel:
    """Glances of one process.

    Args:
        tracker: of its parameters.
        budget: says how long a glance may take, and is woken.
    """

    def __init__(self, tracker: StateTracker, budget: Budget) -> None:
        self._tracker, self._budget = tracker, budget
        self._all: list[tuple[int, Any]] = []  # id and weak reference of each parameter
        self._layout = -1
        self._at = 0  # whose turn it is
        self._several = 1  # parameters of one glance,
        self._every = 1  # of so many steps
        self._waits = 0
        self._seen: dict[int, int] = {}  # fingerprint at the last glance
        self._told: set[tuple[int, str]] = set()  # of what was woken for already

    @property
    def round(self) -> int:
        """Steps until every parameter had its turn."""
        return self._every * -(-len(self._all) // self._several)

    def glance(self) -> None:
        """After an update, in a step that is not looked at in full."""
        self._waits += 1
        if self._waits < self._every:
            return
        self._waits = 0
        begin = time.perf_counter()
        if self._layout != self._tracker.layout:
            self._layout = self._tracker.layout
            self._all = [(key, weakref.ref(p)) for key, p in self._tracker.parameters()]
            self._seen = {key: self._seen[key] for key, _ in self._all if key in self._seen}
        turn = [self._all[(self._at + i) % len(self._all)] for i in range(min(self._several, len(self._all)))]
        self._at = (self._at + len(turn)) % max(len(self._all), 1)
        there = [(key, p) for key, ref in turn if (p := ref()) is not None]
        for (key, p), summary in zip(there, fingerprint_all([_local(p) for _, p in there]), strict=True):
            if summary.flags & _BAD:
                self._wake(key, "finite")
            elif self._seen.get(key) == summary.fp and p.grad is not None and not self._rests(key, p.grad):
                self._wake(key, "moved")
            self._seen[key] = summary.fp
        spent, most = (time.perf_counter() - begin) / self._every, self._budget.light_s
        if spent > most and self._several > 1:
            self._several //= 2
        elif spent > most:
            self._every = min(2 * self._every, _RARELY)
        elif spent < most / 2 and self._every > 1:
            self._every //= 2
        elif spent < most / 2:
            self._several = min(2 * self._several, _MOST)

    def _rests(self, key: int, grad: Any) -> bool:
        """Whether there was nothing to move this parameter: no gradient, or no learning rate."""
        return self._tracker.has_no_rate(key) or bool(fingerprint_all([_local(grad)])[0].flags & int(StateFlag.ZERO))

    def _wake(self, key: int, why: str) -> None:
        if (key, why) not in self._told:
            self._told.add((key, why))
            self._budget.wake()


def _local(tensor: Any) -> Any:
    """Of a DTensor this rank's part."""
    return getattr(tensor, "_local_tensor", tensor)
