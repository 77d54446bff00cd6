"""How often the state of a step is copied by value: so seldom that all of this takes at most a hundredth of the time.

`ring` says what each step took; `due` says whether the next one gets values, and if not, why. Copies are taken at every n-th
step, n a power of two, so that ranks of different speed share steps.
"""

from __future__ import annotations

from typing import Final

from proctor.instrument.capsules.step import HeldStep

SHARE: Final = 0.01  # of the time, that all of this may take
LEAST: Final = 0.25  # of that, which copies of the state may take however much the rest does
MAX_INTERVAL: Final = 4096  # steps from one copy of the state to the next
LOOK_AGAIN: Final = 64  # steps after which a state that was too large is measured again


class Pace:
    """Times of one process, in seconds.

    Args:
        mode: `capsule_values` of the configuration: "auto", "always" or "never".
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.interval = 1
        self.spent = 0.0  # of this step, in here
        self.bare = self.whole = 0.0  # of a step without and with values
        self.over_budget = ""  # why no state fits; "" where it does
        self._too_dear = ""
        self._period = self._opened_at = 0.0

    def opens(self, at: float) -> None:
        """A step begins."""
        if self._opened_at:
            self._period = _mean(self._period, at - self._opened_at)
        self._opened_at = at

    def due(self, step: HeldStep) -> bool:
        """Whether the state is copied at this step; if not, the step says why."""
        if self._mode == "always" or (self._mode == "auto" and not self.over_budget and not step.step % self.interval):
            return True
        if self._mode == "never":
            step.why_not = "values are not kept (capsule_values = never)"
        elif not self.over_budget:
            step.why_not, step.skipped = self._too_dear, True
        elif step.step % LOOK_AGAIN:
            step.why_not = self.over_budget
        else:
            return True
        return False

    def account(self, step: HeldStep) -> None:
        """Learn from what a step took, other than the first of all: it imports."""
        spent, self.spent = self.spent, 0.0
        if step.step == 0:
            return
        if step.values is None:
            self.bare = _lately(self.bare, spent)
        else:
            self.whole = _lately(self.whole, spent)
        self._adapt()

    def _adapt(self) -> None:
        if self._period <= 0 or self._mode == "always":
            return
        share, cost, interval = SHARE * self._period, self.whole - self.bare, 1
        allowed = max(share - self.bare, LEAST * share)
        while interval < MAX_INTERVAL and cost > interval * allowed:
            interval *= 2
        if interval != self.interval:
            self.interval = interval
            self._too_dear = f"values are kept at every {interval}th step: a copy takes {1e3 * cost:.1f} ms"


def _lately(old: float, new: float) -> float:
    """A mean in which less counts at once: what is more than the work itself is that somebody else had the processor."""
    return new if new < old else _mean(old, new)


def _mean(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new
