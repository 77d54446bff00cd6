"""What being watched costs the ranks, as they say, and how long a step may go without being looked at.

Each rank says it in its `process.json` (`instrument/budget.py`), about once a second:

    {"overhead": {"seconds": 3.1, "budget": 0.01, "share": 0.009, "looked": 331, "steps": 4000, "delay": 186, "round": 16}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Overhead:
    """Of one rank, or of those that are worst off.

    seconds: so far.
    budget: share of the time of training that it may cost; 0: no limit.
    share: that it costs, behind the first steps.
    looked, steps: steps that were looked at, of how many.
    delay: steps that may go by between two looks, at most.
    round: steps in which every piece of a parameter was glanced at.
    """

    seconds: float = 0.0
    budget: float = 0.0
    share: float = 0.0
    looked: int = 0
    steps: int = 0
    delay: int = 0
    round: int = 0

    @property
    def thin(self) -> bool:
        """Whether steps were left out."""
        return self.looked < self.steps


class Overheads:
    """Of all ranks of a job."""

    def __init__(self) -> None:
        self._of: dict[str, Overhead] = {}

    def hear(self, process: str, info: Mapping[str, Any]) -> float:
        """What a process says; returns the seconds that it spent since it said so last. What is no number counts as nothing."""
        said = info.get("overhead")
        if not isinstance(said, Mapping):
            return 0.0
        before, now = self._of.get(process, Overhead()), _read(said)
        self._of[process] = now
        return max(0.0, now.seconds - before.seconds)

    def worst(self) -> Overhead:
        """Of each number the worst."""
        if not self._of:
            return Overhead()
        all_ = self._of.values()
        least = min(all_, key=lambda one: one.looked / one.steps if one.steps else 1.0)
        return Overhead(
            sum(one.seconds for one in all_), max(one.budget for one in all_), max(one.share for one in all_),
            least.looked, least.steps, max(one.delay for one in all_), max(one.round for one in all_),
        )  # fmt: skip

    def words(self) -> str:
        """One sentence on a budget, "" where there is none."""
        worst = self.worst()
        if not worst.budget:
            return ""
        if not worst.share and not worst.thin:  # nothing was counted against it
            return f"the first steps are all looked at, so were these {worst.steps}, which took {worst.seconds:.1f} s of the training processes; the budget of {100 * worst.budget:g} % is kept behind them"
        kept = "" if worst.share <= worst.budget * 1.5 else ", which could not be kept"
        glanced = f"; replicas, movement and finiteness of all parameters were glanced at every {worst.round} steps" if worst.thin and worst.round else ""
        delay = f"; a step waits for the next look for {worst.delay} steps at most" if worst.thin and worst.delay else ""
        return f"being watched cost {100 * worst.share:.1f} % of the time of training, the budget is {100 * worst.budget:g} %{kept}{delay}{glanced}"


def _read(said: Mapping[str, Any]) -> Overhead:
    def number(name: str) -> float:
        value = said.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15 else 0.0

    whole = (int(number(name)) for name in ("looked", "steps", "delay", "round"))
    return Overhead(number("seconds"), number("budget"), number("share"), *whole)
