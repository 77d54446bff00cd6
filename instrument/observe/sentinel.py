"""Glances at pieces of parameters after every update, also in steps that a budget leaves out: what is wrong with them brings the full look back.

It gives no verdict and writes no record. A value that is not finite, and a piece with a gradient that was not moved since its last glance, are a
reason to look at the next steps in full, where the rules judge. The fingerprints go to the verifier, which holds those of replicas against
each other (`verify/live/glances.py`) and asks for the full look where they part.

A glance costs much for its first piece and little for the next ones, so it is taken at every 2^k-th step, of as many pieces as a few such steps
pay for. The pieces take turns by the number of the step: of level n, every 2^n-th piece. Which turn it is follows from the step alone (`turn_of`), so pieces
of one level are among those of the next lower one, steps of one k among those of the next lower one, and ranks whose budgets allow
different levels share what the highest have. What lies on a device is read in a later step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.observe.fingerprint import Summary, fingerprint_parts, glance_at
from proctor.instrument.observe.refs import TensorRef
from proctor.invariants.schema import StateFlag

if TYPE_CHECKING:
    from proctor.instrument.budget import Budget
    from proctor.instrument.observe.state import StateTracker
    from proctor.invariants.wire.frames import Glances

PIECE_BYTES: Final = 64 << 10
_MOST: Final = 256  # pieces of one glance
_KEPT: Final = 4096  # rows until they are sent, no more than a frame takes (`frames.MAX_GLANCES`)
_TRIED: Final = 8  # glances of a level before another one is chosen
_MAX_PAUSE: Final = 6  # at least every 64th step
_AT_ONCE: Final = 16  # a glance may take what so many steps pay for
_BAD: Final = int(StateFlag.NONFINITE)
_UNREAD: Final = int(StateFlag.UNHASHED)


def turn_of(step: int) -> int:
    """Whose turn it is in a step: with the same zeros at the end of their numbers, steps have turns one behind the other."""
    zeros = min((step & -step).bit_length() - 1, _MAX_PAUSE) if step else _MAX_PAUSE
    return step >> (zeros + (zeros < _MAX_PAUSE))


class Sentinel:
    """Glances of one process.

    Args:
        tracker: of its parameters.
        budget: says how long a glance may take, and is woken.
    """

    def __init__(self, tracker: StateTracker, budget: Budget) -> None:
        self._tracker, self._budget = tracker, budget
        budget.round = lambda: self.round
        self._pieces: list[tuple[int, Any, int, int, str]] = []  # id and weak reference of a parameter, first element, number, name
        self._layout = -1
        self._level = 0
        self._pause = 0  # a glance at every 2^_pause-th step
        self._at = -1  # the step of the last one
        self._spent, self._tried = 0.0, 0  # by the glances of this level
        self._later: deque[tuple[int, int, str, Callable[[], Summary | None]]] = deque()  # step, parameter, piece, of devices
        self._seen: dict[tuple[int, int], int] = {}  # fingerprint at the last glance
        self._told: set[tuple[int, str]] = set()  # of what was woken for already
        self._rows: deque[tuple[int, str, int]] = deque(maxlen=_KEPT)  # step, piece and fingerprint, until they are sent

    @property
    def round(self) -> int:
        """Steps until every piece had its turn."""
        several = self._level > 0 and self._pause < _MAX_PAUSE  # turns go by steps with as many zeros at their end, half of those with more
        return 1 << (self._level + self._pause + several)

    def due(self, step: int) -> bool:
        """Whether there is a glance in this step."""
        return not step & ((1 << self._pause) - 1)

    def next_due(self, step: int) -> int:
        """The first step behind this one in which there is a glance."""
        return (step >> self._pause) + 1 << self._pause

    def glance(self, step: int) -> None:
        """After an update in this step; behind its first one. So a parameter that another optimizer moves had its update since the glance before."""
        if not self.due(step) or step == self._at:
            return
        self._at = step
        begin = time.thread_time()
        self._hear_devices()
        if self._layout != self._tracker.layout:
            self._lay_out()
        turn = self._pieces[turn_of(step) % (1 << self._level) :: 1 << self._level]
        if turn:
            self._look(step, turn)
        self._pace(time.thread_time() - begin)

    def take(self) -> Glances | None:
        """What the verifier has to hear; from any thread."""
        from proctor.invariants.wire.frames import Glances  # late: a launcher that sends nothing never pays

        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        if not rows:
            return None
        names = list(dict.fromkeys(name for _, name, _ in rows))
        at = {name: i for i, name in enumerate(names)}
        return Glances(names, [(step, at[name], fp) for step, name, fp in rows])

    def _lay_out(self) -> None:
        self._layout = self._tracker.layout
        self._pieces = []
        for number, (key, p) in enumerate(self._tracker.parameters()):
            local, ref, name = _local(p), TensorRef(p), self._tracker.names.get(key, "")
            several = local.is_contiguous() and local.is_cpu
            count = max(PIECE_BYTES // max(local.element_size(), 1), 1) if several else max(local.numel(), 1)
            self._pieces += [(key, ref, begin, min(count, local.numel() - begin), f"{number}:{name}:{begin}"[:1024]) for begin in range(0, local.numel(), count)]
        there = {(key, begin) for key, _, begin, _, _ in self._pieces}
        self._seen = {place: fp for place, fp in self._seen.items() if place in there}
        while len(self._pieces) >> self._level > _MOST:
            self._level += 1

    def _look(self, step: int, turn: list[tuple[int, Any, int, int, str]]) -> None:
        there = []
        for piece in turn:
            p = piece[1]()
            if p is not None and _local(p).is_cpu:
                there.append((piece, p))
            elif p is not None and _local(p).is_cuda and len(self._later) < _MOST:
                self._later.append((step, piece[0], piece[4], glance_at(_local(p))))
        found = fingerprint_parts([(_local(p), begin, count) for (_, _, begin, count, _), p in there])
        for ((key, _, begin, count, name), p), summary in zip(there, found, strict=True):
            if summary.flags & _UNREAD:
                continue
            if summary.flags & _BAD:
                self._wake(key, "finite")
            elif self._seen.get((key, begin)) == summary.fp and p.grad is not None and not self._rests(key, p.grad, begin, count):
                self._wake(key, "moved")
            self._seen[key, begin] = summary.fp
            self._rows.append((step, name, summary.fp))

    def _hear_devices(self) -> None:
        """What devices have said since: nobody waits for them. Whether a piece was moved is not asked there."""
        while self._later:
            step, key, name, result = self._later[0]
            summary = result()
            if summary is None:
                return
            self._later.popleft()
            if summary.flags & _BAD:
                self._wake(key, "finite")
            if not summary.flags & _UNREAD:
                self._rows.append((step, name, summary.fp))

    def _pace(self, spent: float) -> None:
        self._spent += spent
        self._tried += 1
        if self._tried < _TRIED:
            return
        mean, most = self._spent / self._tried, self._budget.light_s
        self._spent, self._tried = 0.0, 0
        if mean > _AT_ONCE * most and 1 << self._level < len(self._pieces):
            self._level += 1
        elif mean < _AT_ONCE * most / 3 and self._level and len(self._pieces) >> (self._level - 1) <= _MOST:
            self._level -= 1
        self._pause = 0
        while self._pause < _MAX_PAUSE and mean > most * (1 << self._pause):
            self._pause += 1

    def _rests(self, key: int, grad: Any, begin: int, count: int) -> bool:
        """Whether there was nothing to move this piece: no gradient, or no learning rate."""
        return self._tracker.has_no_rate(key) or bool(fingerprint_parts([(_local(grad), begin, count)])[0].flags & int(StateFlag.ZERO))

    def _wake(self, key: int, why: str) -> None:
        if (key, why) not in self._told:
            self._told.add((key, why))
            self._budget.wake()


def _local(tensor: Any) -> Any:
    """Of a DTensor this rank's part."""
    return getattr(tensor, "_local_tensor", tensor)
