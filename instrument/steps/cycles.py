"""Updates that come in a cycle, as long as a program does what it did before: who is told of each, and who only of their number.

What a clock does with an act follows from its state and the act alone. So where it is behind a cycle of updates as it was before, the same cycle
leads there again, however often, and only numbers grow. A cycle is one update where a program has one optimizer, and a round of them where it has
several (actor and critic, a generator behind each fifth update of a discriminator).

Pure: no torch, and no recorder. `steps/asleep.py` tells updates here and asks what the recorder may count by itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, NamedTuple

from proctor.instrument.steps.rounds import KEPT

if TYPE_CHECKING:
    from proctor.instrument.steps.clock import StepClock

LONGEST: Final = KEPT // 2  # updates of a cycle; as long as rounds that are recognised
_RECENT: Final = 2 * KEPT  # updates that are remembered
_KINDS: Final = 255  # of updates that are told apart; a program with more has no cycle


class Update(NamedTuple):
    """An update and the acts before it, as the recorder notes them (`native/calls/asleep.h`)."""

    acts: str
    who: tuple[int, ...]  # ids of the optimizers of its Z and I
    keys: tuple[int | None, ...]  # what the clock calls them; None: not known
    optimizer: int  # its id
    key: int  # what the clock calls it


class Cycle(NamedTuple):
    """A cycle. Behind the last update the clock is as it was before the first.

    Attributes:
        updates: in their order.
        states: of the clock before each.
        steps: that each begins.
    """

    updates: tuple[Update, ...]
    states: tuple[Hashable, ...]
    steps: tuple[int, ...]

    def turned(self, by: int) -> Cycle:
        """The same, beginning with another update."""
        updates, states, steps = self
        return Cycle((*updates[by:], *updates[:by]), (*states[by:], *states[:by]), (*steps[by:], *steps[:by]))


def replay(clock: StepClock, acts: str, keys: tuple[int | None, ...]) -> tuple[bool, list[int]]:
    """Tell a clock of acts in their order.

    Args:
        clock: of the program.
        acts: as the recorder notes them.
        keys: what the clock calls the optimizers of the Z and I among them.

    Returns:
        whether all could be followed, and the optimizers that were called by the update that follows.
    """
    plain, inner, at = True, list[int](), iter(keys)
    for act in acts:
        if act in "FP":
            clock.forward(True, probing=act == "P")
        elif act == "E":
            clock.forward(False)
        elif act == "B":
            clock.backward()
        elif act == "D":
            clock.fetched()
        elif act == "M":
            clock.zero_grad(None)
        elif act == "X" or (key := next(at)) is None:
            plain = False
        elif act == "Z":
            clock.zero_grad(key)
        else:
            inner.append(key)
    return plain, inner


class Cycles:
    """Finds the cycle of one process, and brings its clock forward.

    Args:
        clock: of the process. Between two calls of `told` nobody else may tell it of acts, but for `broken`.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._known: Cycle | None = None
        self._running: Cycle | None = None  # what the recorder expects
        self._kinds: dict[Update, int] = {}
        self._recent = bytearray()  # kinds of the last updates, told one by one or not
        self._trial: tuple[int, list[Hashable], list[int]] | None = None  # a length, and the states and steps since it was found

    def broken(self) -> None:
        """Something came that is no plain update: what was before it says nothing of what follows."""
        self._recent.clear()
        self._trial = None

    def forget(self) -> None:
        """Optimizers have changed."""
        self._known = self._running = None
        self._kinds.clear()
        self.broken()

    def told(self, update: Update, steps: int) -> None:
        """The clock was told of an update, and of what came before it.

        Args:
            update: which one; one that is at rest is none (`StepClock.at_rest`).
            steps: that began with it.
        """
        kind = self._kind(update)
        self._remember(bytes([kind]))
        if self._trial is not None and kind != self._recent[-1 - self._trial[0]]:
            self._trial = None
        if self._trial is not None:
            self._try_on(steps)
        elif steps and (length := self._length()):
            self._trial = length, [self._clock.state()], []

    def expected(self, steps: int) -> tuple[tuple[tuple[str, tuple[int, ...], int], ...], int]:
        """What comes if the program goes on as it did.

        Args:
            steps: that may begin until somebody has to look.

        Returns:
            the updates of a cycle (acts, ids, optimizer's id), the next one first, and how many updates there are until so many steps
            have begun; 0: nothing is expected.
        """
        self._running = None
        known = self._known
        if known is None or self._trial is not None or steps < 1:
            return (), 0
        last = self._recent[-1] if self._recent else 0
        candidates = [i for i, before in enumerate(known.updates) if not last or self._kinds.get(before) == last]
        if not candidates:
            return (), 0
        state = self._clock.state()
        at = next((i + 1 for i in candidates if known.states[(i + 1) % len(known.states)] == state), None)
        if at is None:
            return (), 0
        cycle = self._running = known.turned(at % len(known.updates))
        whole, left = divmod(steps - 1, sum(cycle.steps))
        number = whole * len(cycle.updates)
        for begun in cycle.steps:
            number, left = number + 1, left - begun
            if left < 0:
                break
        return tuple((u.acts, u.who, u.optimizer) for u in cycle.updates), number

    def passed(self, number: int) -> tuple[int, int]:
        """So many updates came as expected; the clock is brought to where it is behind them.

        Returns:
            how many steps of them have begun in whole cycles (of the rest the clock says so itself), and how many acts there were.
        """
        cycle = self._running
        if not number or cycle is None:
            return 0, 0
        whole, rest = divmod(number, len(cycle.updates))
        acts = "".join(u.acts for u in cycle.updates)
        steps, count = whole * sum(cycle.steps), whole * len(acts)
        if whole:
            self._clock.pass_by(whole, steps, sum(map(acts.count, "FPB")), tuple(u.key for u in cycle.updates))
        for update in cycle.updates[:rest]:
            _, inner = replay(self._clock, update.acts, update.keys)
            self._clock.update_begins(update.key)
            self._clock.update_ends(update.key, tuple(inner))
            count += len(update.acts)
        kinds = bytes(self._kind(u) for u in cycle.updates)
        self._remember(kinds * min(whole, _RECENT // len(kinds) + 1) + kinds[:rest])
        self._running = None if rest else cycle
        return steps, count

    def _remember(self, kinds: bytes) -> None:
        self._recent += kinds
        del self._recent[:-_RECENT]

    def _kind(self, update: Update) -> int:
        if len(self._kinds) >= _KINDS and update not in self._kinds:
            self._kinds.clear()
            self.broken()
        return self._kinds.setdefault(update, len(self._kinds) + 1)

    def _length(self) -> int:
        """Of the shortest cycle that has just come twice; 0: none."""
        recent = self._recent
        for length in range(1, min(LONGEST, len(recent) // 2) + 1):
            if recent[-1] == recent[-1 - length] and recent[-length:] == recent[-2 * length : -length]:
                return length
        return 0

    def _try_on(self, steps: int) -> None:
        """A cycle has come twice; when it has come once more, the clock has to be where it was."""
        assert self._trial is not None
        length, states, begun = self._trial
        states.append(self._clock.state())
        begun.append(steps)
        if len(begun) < length:
            return
        self._trial = None
        if states[0] == states[-1]:
            names = {kind: update for update, kind in self._kinds.items()}
            self._known = Cycle(tuple(names[kind] for kind in self._recent[-length:]), tuple(states[:-1]), tuple(begun))
