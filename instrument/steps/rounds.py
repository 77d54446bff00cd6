"""Whose turn it is where a program has several optimizers: does what comes now belong to this round of updates or to the next?

Only the update itself would tell for sure, and its forward and backward come before it. So this is told from signs, the surest first:

1. A batch was fetched since the last update: the next round.
2. A batch was fetched before this round, and none since: this round; in a program of which this was never wrong.
3. Who will update now is known from earlier rounds. The one that was the first of all to update begins a round.
4. An optimizer is cleared, in a program that clears before a backward: the next round if it has updated in this one or begins rounds.
5. Nothing is known: the next round. A round that is cut in two is two whole steps; two rounds in one are none.

All of them are acts of the program, so that ranks which do the same count the same.
"""

from __future__ import annotations

from collections.abc import Hashable

BY_HAND = 0  # who updates where there is no optimizer; no object has this id
KEPT = 96  # updates remembered: rounds of up to half as many (one generator update after 40 of a critic) are recognised
_ALIKE = 2  # updates that must be as they were in an earlier round to tell who is next
_ABSENT = 64  # rounds without an update after which an optimizer is no member any more


class Rounds:
    """The updates of a program, in rounds in which each optimizer updates once at most.

    Attributes:
        members: optimizers that take part.
        ended: this round had an update.
        over: this round is over, whoever takes part in the next one.
    """

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.ended = False
        self.over = False
        self._updated: set[int] = set()  # in this round
        self._absent: dict[int, int] = {}  # rounds in a row without an update, by member
        self._history: list[int] = []  # who updated, the last at the end
        self._first: int | None = None  # who was the first of all to update
        self._batches_tell = True  # no optimizer updated twice with one batch
        self._fetched = False  # a batch, since the last update
        self._fetched_before = False  # a batch, between the last update of the round before and the first of this one
        self._cleared: int | None = None  # the last one since the last update
        self._clears_first: dict[int, bool] = {}  # whether it was cleared before its first update
        self._decided: bool | None = None  # of what comes between two updates, the first act decides

    def joins(self, key: int, anew: bool) -> None:
        """An optimizer was made; `anew`: between two steps, so that earlier ones may be done with."""
        if anew and (not self.ended or self._complete()):
            self.over = self.ended
            self._first = None
            self.members.clear()
            self._absent.clear()
        self.members.discard(BY_HAND)
        self.members.add(key)
        self._updated.discard(key)  # an id of one that is gone
        self._clears_first.pop(key, None)

    def repeats(self, key: int) -> bool:
        """Whether an optimizer that is about to update has done so in this round."""
        again = key in self._updated
        if again and self._fetched_before and not self._fetched:
            self._batches_tell = False
        return again

    def fetched(self) -> None:
        self._fetched = True

    def cleared(self, key: int) -> None:
        if self._clears_first.setdefault(key, True):
            self._cleared = key

    def updated(self, key: int, inner: tuple[int, ...]) -> None:
        self.members.add(key)
        if self._first is None:
            self._first = key
        self._updated.update((key, *inner))
        for each in (key, *inner):
            self._absent.pop(each, None)
            self._clears_first.setdefault(each, False)
        if not self.ended:
            self._fetched_before |= self._fetched
        self.ended = True
        self._history.append(key)
        del self._history[:-KEPT]
        self._fetched, self._cleared, self._decided = False, None, None

    def state(self) -> Hashable:
        """All that later answers follow from. Where one optimizer is left nobody asks who was before."""
        return (
            self.ended, self.over, self._decided, self._first, self._cleared, self._fetched, self._fetched_before, self._batches_tell,
            frozenset(self._updated), frozenset(self.members), tuple(self._absent.items()), tuple(self._clears_first.items()),
            tuple(self._history) if len(self.members) > 1 else (),
        )  # fmt: skip

    def pass_by(self, times: int, keys: tuple[int, ...]) -> None:
        """Rounds behind which all else is as it was: so many times these optimizers updated."""
        self._history += keys * min(times, KEPT // len(keys) + 1)
        del self._history[:-KEPT]

    def done(self) -> bool:
        """Whether a forward or backward now is of the next round."""
        if self.over or not self.ended:
            return self.over
        if self._complete():
            return True
        if self._decided is None:
            self._decided = self._fetched or self._expects_next()
        return self._decided

    def begin(self) -> None:
        """The next round."""
        for key in self.members - self._updated:
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= _ABSENT:
                self.members.discard(key)
        self._updated.clear()
        self._fetched_before = self._fetched
        self.over = self.ended = self._fetched = False
        self._cleared = self._decided = None

    def _complete(self) -> bool:
        return self.members <= self._updated

    def _expects_next(self) -> bool:
        if self._fetched_before and self._batches_tell:
            return False
        following = self._following()
        if following is None:
            following = self._cleared
        return following is None or following in self._updated or following == self._first

    def _following(self) -> int | None:
        """Who updated after the longest stretch of the past that was as the last updates are, None if there is none or if not always the same."""
        past = self._history
        longest, found = _ALIKE - 1, set[int]()
        for end in range(len(past) - 1, 0, -1):
            same = 0
            while same < end and past[end - 1 - same] == past[-1 - same]:
                same += 1
            if same > longest:
                longest, found = same, {past[end]}
            elif same == longest >= _ALIKE:
                found.add(past[end])
        return found.pop() if len(found) == 1 else None
