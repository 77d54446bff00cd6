"""Where replicas part in steps that a budget leaves out: fingerprints of pieces of parameters, held against each other as they come.

Ranks glance at the same pieces in the same steps (`instrument/observe/sentinel.py`). Which of them ought to be equal nobody says: what was equal
in several steps in a row, over updates, is taken for replicas, and the step in which it is not so any more is a reason to look at the next steps in
full. There the rules judge; nothing is told from here. What sharded ranks hold was never equal, so it is never asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

_AGREED: Final = 3  # steps in a row
_WAITING: Final = 1 << 16  # pieces at steps that not all ranks have told; older ones are forgotten
_ASKED: Final = 16  # full looks in a life of the job, so that a program whose replicas part on purpose is not looked at for ever
_PATIENCE: Final = 256  # steps that a rank may be behind


class Glances:
    """Of one life of a job."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[int, str], dict[str, int]] = OrderedDict()
        self._told: dict[str, int] = {}  # by process the last step of which it told
        self._alike: dict[str, tuple[dict[str, int], int]] = {}  # by piece: group of each process, steps in a row
        self._asked = 0
        self.compared = 0  # pieces at steps

    def hear(self, process: str, rows: Iterable[tuple[int, str, int]]) -> tuple[int, str] | None:
        """What a process saw.

        Args:
            rows: step, piece, fingerprint.

        Returns:
            step and piece of replicas that have parted; None: of none, or enough was asked for.
        """
        for step, piece, fp in rows:
            self._waiting.setdefault((step, piece), {})[process] = fp
            self._told[process] = max(self._told.get(process, -1), step)
        latest = max(self._told.values(), default=-1)
        until = min((step for step in self._told.values() if step >= latest - _PATIENCE), default=-1)
        parted = None
        for at in [at for at in self._waiting if at[0] <= until]:
            found = self._waiting.pop(at)
            if len(found) > 1 and self._parts(at[1], found) and parted is None:
                parted = at
        while len(self._waiting) > _WAITING:
            self._waiting.popitem(last=False)
        if parted is None or self._asked >= _ASKED:
            return None
        self._asked += 1
        return parted

    def leave(self, process: str) -> None:
        """It tells no more."""
        self._told.pop(process, None)

    def _parts(self, piece: str, found: dict[str, int]) -> bool:
        """Whether processes that agreed on a piece for a while differ now."""
        self.compared += 1
        before, times = self._alike.get(piece, ({}, 0))
        there = {process: group for process, group in before.items() if process in found}
        split = len({(there[p], found[p]) for p in there}) > len(set(there.values()))
        joined = len({(there[p], found[p]) for p in there}) > len({found[p] for p in there})
        if split or joined or not there:
            self._alike[piece] = found, 1
            return split and times >= _AGREED
        label = {found[p]: group for p, group in there.items()}
        self._alike[piece] = before | {p: label.get(fp, fp) for p, fp in found.items() if p not in before}, times + 1
        return False
