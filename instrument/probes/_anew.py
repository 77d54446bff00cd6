"""Whether batches are put together anew when their samples come again: used by `unseen.py`.

A batch all of whose samples were trained on before shows that the data came again. Then it is one of the earlier batches (nothing is shuffled), or another one. Several of
these behind one another are told; what was given in one of the last calls does not count, as a step may use a batch twice.
"""

from __future__ import annotations

from collections import deque
from typing import Final

ANEW: Final = "they are put together anew when their samples come again"
_CALLS: Final = 256  # of one model
_SAMPLES: Final = 1 << 16  # of one model
_READ: Final = 1 << 17  # of all calls of one model: half as much again are compared
_LATELY: Final = 4  # calls
_STILL: Final = 16  # calls behind one another whose batch was given lately: there are no more batches than these
_RUN: Final = 4  # batches of one kind, behind one another
_TOLD: Final = 6  # times of each


class Anew:
    """The batches of one model that trains."""

    def __init__(self) -> None:
        self._samples: set[int] = set()
        self._batches: set[int] = set()
        self._lately: deque[int] = deque(maxlen=_LATELY)
        self._calls = self._read = self._still = 0
        self._run = {True: 0, False: 0}  # of batches that are new, and of those that were given before
        self._told = {True: 0, False: 0}

    @property
    def over(self) -> bool:
        return self._calls >= _CALLS or self._read >= _READ or self._still >= _STILL or len(self._samples) >= _SAMPLES

    def meets(self, samples: set[int]) -> bool | None:
        """Take a batch: True if some behind one another were others than all before, False if they were not, None if there is nothing to tell."""
        self._calls += 1
        self._read += len(samples)
        batch = hash(frozenset(samples))
        lately, known, again = batch in self._lately, batch in self._batches, samples <= self._samples
        self._still = self._still + 1 if lately else 0
        self._lately.append(batch)
        self._batches.add(batch)
        self._samples |= samples
        if lately or not again:
            return None
        new = not known
        self._run = {new: self._run[new] + 1, not new: 0}
        if self._run[new] < _RUN:
            return None
        self._run[new] = 0
        self._told[new] += 1
        return new if self._told[new] <= _TOLD else None
