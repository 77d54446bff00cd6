"""A budget for being watched: how much of a training process's time it costs, and which steps are looked at so that it costs no more.

The observer asks before each step. What is measured, all in CPU time, since the clock on the wall of a busy machine counts what others do: what our
hooks take in the training thread, what the threads that write and send take, and the calls that were recorded, at what recording one costs; and what
the training thread takes without them, which is no more than the time that a step lasts. What is decided: the density of the steps that are
looked at, in blocks of three neighbours, since many rules hold a step against the one before.

    a step of 11 ms, 3 ms of it ours, a budget of 1 %  →  one block in 32, 96 steps on average from one to the next, 189 at most

All ranks have to look at the same steps, and each measures for itself. So blocks are nested: those of one density are among those of the
next higher one, whatever the others measure, and where they lie is drawn from their number alone, so that they keep no time with a program
that does something each hundred steps. Of each window of 2^level blocks exactly one is looked at: the delay is bounded.

What is not looked at leaves no record, and rules take it for unknown, as they do with `--every`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from proctor.instrument.config import RecordConfig
    from proctor.instrument.own_thread import OwnThread

FREE: Final = 200  # first steps, which are all looked at where nobody says how many: most of what is wrong is wrong from the start,
FREE_S: Final = 300.0  # and so are all steps of the first five minutes: who waits for a short job would rather have it looked at in full
BLOCK: Final = 3  # neighbouring steps that are looked at together
MAX_LEVEL: Final = 10  # one block in 1024, however long steps are; 6,138 steps without a look at most
DEEPEST: Final = 13  # where steps are so short that no more than
LONGEST_S: Final = 120.0  # go by without a look
FOCUS: Final = 24  # steps that are all looked at when something is wrong
_CALL_S: Final = 4e-7  # what recording a call costs (benchmarks/tap.py)
_ROUND: Final = 1 / 16  # weight of a new step in the running means
_TIMED: Final = 7  # coprime to how often a sentinel glances; one in so many of the steps that are not looked at is timed
SAID_S: Final = 5.0  # between two reports, each of which is written and sent
_AIM: Final = 0.5  # of the budget: our threads, glances and what our code throws out of caches in a step that is left out take as much again (benchmarks/budget_cost.py)
_GLANCES: Final = 1 / 8  # of the budget; by CPU seconds of the training thread a glance costs 2.5 times what it measures of itself (benchmarks/budget_cost.py)
_HIDDEN: Final = 2.0  # times what a look measures of itself, that it may cost besides: more is the program's own, which has steps of several kinds
_SETTLED: Final = 4  # steps of a kind before what they cost is believed
_MASK: Final = (1 << 64) - 1


def looks_at(step: int, level: int) -> bool:
    """Whether a step is in the block of its window of 2^level blocks; the same for all processes, and nested in lower levels."""
    block = max(step, 0) // BLOCK
    return all(_drawn(block >> above, above) == block >> (above - 1) & 1 for above in range(1, level + 1))


def next_chosen(step: int, level: int) -> int:
    """The first step from this one on that is looked at."""
    if looks_at(step, level):
        return step
    window = (max(step, 0) // BLOCK) >> level
    while True:
        block = window
        for above in range(level, 0, -1):
            block = 2 * block + _drawn(block, above)
        if block * BLOCK > step:
            return block * BLOCK
        window += 1


def longest_gap(level: int) -> int:
    """Steps without a look between two blocks, at most."""
    return BLOCK * (2 * (1 << level) - 2)


def _drawn(window: int, level: int) -> int:
    """A bit that follows from a window's number: its first or its second half (splitmix64)."""
    mixed = (window * 64 + level + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) & 1


class Meter:
    """CPU seconds that our hooks have taken, in whatever thread; those within others count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.idle = False  # nothing is timed at present
        self._within = False

    def around(self, hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, timed."""

        def timed(*args: Any) -> None:
            if self._within or self.idle:
                hook(*args)
                return
            self._within = True
            begin = time.thread_time()
            try:
                hook(*args)
            finally:
                self.seconds += time.thread_time() - begin
                self._within = False

        return timed


class _Mean:
    """A running mean that one slow step (a page fault, a checkpoint) does not move far."""

    def __init__(self) -> None:
        self.value = 0.0
        self.seen = 0

    def add(self, value: float) -> None:
        self.seen += 1
        if self.seen > _SETTLED:
            value = min(value, 4 * self.value)
        self.value += (value - self.value) * max(_ROUND, 1 / self.seen)


class Budget:
    """Measures what a process's being watched costs, and keeps it.

    Args:
        share: of the time of training that it may cost; 0: whatever it does, it is only measured.
        free: first steps, which are all looked at.
        threads: of ours besides the training thread.
        clock: CPU seconds of the training thread.
        free_s: seconds from the first step on, in which steps are looked at as well.
        now: seconds on the wall.
    """

    def __init__(
        self,
        share: float,
        free: int,
        threads: Callable[[], list[OwnThread]] = list,
        clock: Callable[[], float] = time.thread_time,
        free_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share, self.free = share, free
        self._free_s, self._free_until, self._now = free_s, math.inf if free_s else -math.inf, now
        self.meter = Meter()
        self.level = 0
        self.looked = self.steps = 0  # steps that were looked at, and all
        self.looking = True
        self._threads, self._clock = threads, clock
        self._full, self._thin = _Mean(), _Mean()  # of ours in a step that is looked at, and in one that is not,
        self._beside, self._bare = _Mean(), _Mean()  # and of the program's: more where a look threw its data out of the caches
        self._began = self._own = self._spent_before = 0.0
        self._calls = 0
        self._untimed = 0  # steps since one was timed
        self._cpu = 0.0  # of our threads, when it was last asked
        self._block, self._chosen = -1, True  # the block that was asked about last, and what was said
        self._focus = -1  # steps before this one are all looked at
        self._step = -1
        self._asleep = _Mean()  # of ours a step without hooks,
        self._slept_since = 0.0  # since when there are such
        self._woken = False  # by another thread, or by what was seen in the present step
        self._highest = 0  # level so far
        self._lasts = _Mean()  # seconds on the wall of a step
        self._counted = (0.0, 0)  # when that was taken last, and steps by then
        self._said: dict[str, Any] = {}
        self._said_at = 0.0
        self.round: Callable[[], int] = lambda: 0  # steps in which every piece of a parameter is glanced at
        self.since_free = [0.0, 0.0]  # own and other seconds of the steps behind the free ones

    @property
    def own_s(self) -> float:
        """Seconds so far."""
        return self.meter.seconds + self._own

    @property
    def left_out(self) -> int:
        """Steps so far that were not looked at."""
        return self.steps - self.looked

    @property
    def light_s(self) -> float:
        """Seconds that a look at a few values may take in a step that is not looked at otherwise."""
        return self.share * self._unwatched_s * _GLANCES

    def wake(self) -> None:
        """Something is wrong: the next steps are all looked at. From any thread."""
        self._woken = True

    def next_step(self, step: int, calls: int) -> bool:
        """A step is about to be counted.

        Args:
            step: its number.
            calls: recorded so far.

        Returns:
            whether it is looked at.
        """
        self._account(calls)
        if self._free_until > -math.inf:
            self._extend(step)
        if self._woken:
            self._woken, self._focus = False, step + FOCUS
        self._step = step
        if self.share and step % BLOCK == 0 and step >= self.free:
            self._settle()
        self.looking = not self.share or step < max(self.free, self._focus) or self._is_chosen(step)
        self.steps += 1
        self.looked += self.looking
        self.meter.idle = not self.looking and self.steps % _TIMED > 0
        return self.looking

    def _extend(self, step: int) -> None:
        """While the first seconds last, the next step is free, too."""
        now = self._now()
        if self._free_until == math.inf:
            self._free_until = now + self._free_s
        if now < self._free_until:
            self.free = max(self.free, step + 2)
        else:
            self._free_until = -math.inf

    @property
    def woken(self) -> bool:
        """Whether something is wrong, and the next steps are to be looked at for it."""
        return self._woken

    def next_look(self, step: int) -> int:
        """The first step from this one on that will be looked at, as far as is known now."""
        if not self.share or self._woken or step < max(self.free, self._focus):
            return step
        return next_chosen(step, self.level)

    def falls_asleep(self) -> None:
        """No hook runs from now on."""
        self._slept_since = self._clock()

    def passes(self, step: int, number: int = 1) -> None:
        """So many steps begin in which no hook runs, this one the last."""
        self._step = step
        self.steps += number

    def wakes_up(self, steps: int, spent: float) -> None:
        """Hooks run again.

        Args:
            steps: that went by meanwhile.
            spent: seconds that counting them took.
        """
        now = self._clock()
        spent += self._of_threads()
        elapsed = now - self._slept_since
        self._own += spent
        if steps > 0:
            self._asleep.add(spent / steps)
            self._bare.add(max(0.0, elapsed - spent) / steps)
        self.since_free[0] += spent
        self.since_free[1] += max(0.0, elapsed - spent)
        self._began, self._spent_before = now, self.own_s

    def looks_next(self) -> bool:
        """Whether the step after the present one will be looked at, as far as is known now."""
        step = self._step + 1
        return not self.share or self._woken or step < max(self.free, self._focus) or looks_at(step, self.level)

    def _is_chosen(self, step: int) -> bool:
        if step // BLOCK != self._block:
            self._block, self._chosen = step // BLOCK, looks_at(step, self.level)
        return self._chosen

    def _account(self, calls: int) -> None:
        now = self._clock()
        if self.meter.idle:  # not timed: as those that were
            self._own += self._thin.value
            self._untimed += 1
        else:
            self._own += max(0, calls - self._calls) * _CALL_S + self._of_threads() / (self._untimed + 1)
            self._untimed = 0
        spent = self.own_s - self._spent_before
        if self._began and self.meter.idle:
            self.since_free[0] += spent
            self.since_free[1] += max(0.0, now - self._began - spent)
        elif self._began:
            bare = max(0.0, now - self._began - spent)
            (self._beside if self.looking else self._bare).add(bare)
            (self._full if self.looking else self._thin).add(spent)
            if self._step >= self.free:
                self.since_free[0] += spent
                self.since_free[1] += bare
        self._began, self._calls, self._spent_before = now, calls, self.own_s

    def _of_threads(self) -> float:
        """CPU seconds that our threads took since the last time."""
        total = 0.0
        for thread in self._threads():
            if thread.ident is not None and thread.is_alive():
                total += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        more, self._cpu = max(0.0, total - self._cpu), total
        return more

    def _settle(self) -> None:
        """Choose how many of the next steps are looked at: fewer at once, more step by step."""
        if self._full.seen < _SETTLED:
            return
        thin = self._thin.value if self._thin.seen >= _SETTLED else 0.0
        rest = self._asleep.value if self._asleep.seen else thin  # of most steps; a block has a thin one on each side
        room = _AIM * self.share * self._unwatched_s - rest
        dear = self._full.value + self._hidden_s() + 2 * max(0.0, thin - rest) / BLOCK - rest
        deepest = self._deepest()
        wanted = 0 if dear <= room else deepest if room <= 0 else min(deepest, math.ceil(math.log2(dear / room)))
        self.level = wanted if wanted > self.level else max(wanted, self.level - 1)
        self._highest = max(self._highest, self.level)

    def _deepest(self) -> int:
        """The highest level: steps that take milliseconds may have more of them without a look."""
        now, (before, steps) = self._now(), self._counted
        self._counted = now, self.steps
        if before and self.steps > steps:
            self._lasts.add((now - before) / (self.steps - steps))
        level = MAX_LEVEL
        while self._lasts.seen >= _SETTLED and level < DEEPEST and longest_gap(level + 1) * self._lasts.value <= LONGEST_S:
            level += 1
        return level

    @property
    def _unwatched_s(self) -> float:
        """Seconds that the program takes for a step that is left out; until there was one, for a step."""
        return (self._bare if self._bare.seen >= _SETTLED else self._beside).value

    def _hidden_s(self) -> float:
        """Seconds by which the program itself is slower in a step that is looked at, which no clock around our hooks sees."""
        return min(max(0.0, self._beside.value - self._unwatched_s), _HIDDEN * self._full.value)

    def facts(self, *, last: bool = True) -> dict[str, Any]:
        """For `process.json` and the verifier; what was said lately is said again, unless this is the last time."""
        now = time.monotonic()
        if last or not self._said or now - self._said_at >= SAID_S:
            self._said, self._said_at = self._facts(), now
        return self._said

    def _facts(self) -> dict[str, Any]:
        own, other = self.since_free
        return {
            "overhead": {
                "seconds": round(self.own_s, 1),
                "budget": self.share,
                "share": round(own / other, 4) if other > 0 else 0.0,
                "looked": self.looked,
                "steps": self.steps,
                "delay": longest_gap(self._highest) if self.share else 0,
                "round": self.round(),
            }
        }


def make_budget(config: RecordConfig, threads: Callable[[], list[OwnThread]]) -> Budget | None:
    """Of a process that is watched; one that is only recorded has none."""
    if not config.stream:
        return None
    return Budget(config.budget, config.warmup, threads, free_s=config.warmup_s)
