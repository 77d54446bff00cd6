"""How often a verifier judges what is not urgent: so that looking at steps that look like none before takes a small part of the time.

`online.py` asks. Training repeats itself, so after its first steps nearly every window looks like one that was found healthy and costs
nothing. The first ones cost tens of milliseconds a relation, and one round over thirty steps costs what a round over one step does. So
after a round that took long the next waits, and then judges all that has ended meanwhile, at once.

    a round of 0.4 s, a share of 0.1  →  the next after 3.6 s; one of 2 s  →  the next after 10 s (`MOST_S`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.1  # of the time, for rounds that are not urgent
MOST_S: Final = 10.0  # that such a round waits for
_FREE_S: Final = 0.02  # a round that takes less is not waited for: it was remembered


@dataclass
class Pace:
    """The rounds of one verifier.

    Args:
        share: of the time that rounds may take.
        most_s: that one waits, whatever the last one took.
    """

    share: float = SHARE
    most_s: float = MOST_S
    _due: float = 0.0
    _spent: float = 0.0

    def due(self, now: float) -> bool:
        """Whether the next round may begin; `now` in seconds of a clock that never jumps."""
        return now >= self._due

    def took(self, seconds: float) -> None:
        """A part of the present round took so long."""
        self._spent += seconds

    def over(self, now: float, *, found: bool) -> None:
        """The present round is done.

        Args:
            found: it found a violation: what comes now is looked at without a pause.
        """
        pause = 0.0 if found or self._spent < _FREE_S else min(self._spent * (1 / self.share - 1), self.most_s)
        self._due, self._spent = now + pause, 0.0
