"""A program that repeats itself: where updates are only counted, the clock is in the end where it would be if it had been told of each."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.instrument.steps.clock import StepClock
from proctor.instrument.steps.cycles import Cycles, Update, replay

KEYS = (11, 12, 13)
UPDATES = st.builds(
    lambda acts, key, cleared: Update("".join(acts), (cleared + 100,) * acts.count("Z"), (cleared,) * acts.count("Z"), key + 100, key),
    st.lists(st.sampled_from("FPEBZMD"), max_size=5), st.sampled_from(KEYS), st.sampled_from(KEYS),
)  # fmt: skip
PROGRAMS = st.lists(st.tuples(st.lists(UPDATES, min_size=1, max_size=6), st.integers(1, 60)), min_size=1, max_size=4)


def everything(clock: StepClock) -> tuple[object, ...]:
    return clock.step, clock.state(), list(clock._rounds._history), clock._acts - clock._acts_at[KEYS[0]]


def new_clock() -> StepClock:
    clock = StepClock()
    for key in KEYS:
        clock.optimizer_created(key)
    return clock


def tell(clock: StepClock, update: Update) -> bool:
    replay(clock, update.acts, update.keys)
    rests = clock.at_rest(update.key)
    clock.update_begins(update.key)
    clock.update_ends(update.key)
    return not rests


class Recorder:
    """What the native recorder does with an expectation; told are those that differ and the end of what is expected."""

    def __init__(self, clock: StepClock, pauses: Iterator[int]) -> None:
        self.clock, self.cycles, self.pauses = clock, Cycles(clock), pauses
        self.cycle: tuple[tuple[str, tuple[int, ...], int], ...] = ()
        self.limit = self.passed = self.told = 0
        self.due = -1

    def update(self, update: Update) -> None:
        if self.passed < self.limit and self.cycle[self.passed % len(self.cycle)] == (update.acts, update.who, update.optimizer):
            self.passed += 1
            if self.passed == self.limit:
                self.settle()
                assert 0 <= self.clock.step - self.due <= 2, "somebody has to look in this step; an update whose gradients are thrown away begins several"
                self.expect()
            return
        self.settle()
        self.told += 1
        before = self.clock.step
        if tell(self.clock, update):
            self.cycles.told(update, self.clock.step - before)
        else:
            self.cycles.broken()
        self.expect()

    def settle(self) -> None:
        self.cycles.passed(self.passed)
        self.passed = 0

    def expect(self) -> None:
        pause = next(self.pauses)
        self.due = self.clock.step + pause
        self.cycle, self.limit = self.cycles.expected(pause)


def endless(pauses: list[int]) -> Iterator[int]:
    while True:
        yield from pauses


@settings(max_examples=300, deadline=None)
@given(PROGRAMS, st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_what_is_counted_is_what_was_told(program: list[tuple[list[Update], int]], pauses: list[int]) -> None:
    plain, counted = new_clock(), Recorder(new_clock(), endless(pauses))
    for cycle, times in program:
        for update in cycle * times:
            tell(plain, update)
            counted.update(update)
    counted.settle()
    assert everything(counted.clock) == everything(plain)


def trained(cycle: list[Update], times: int) -> Recorder:
    recorder = Recorder(new_clock(), endless([64]))
    for update in cycle * times:
        recorder.update(update)
    return recorder


def test_rounds_of_several_optimizers_are_counted() -> None:
    rounds = [Update("FZB", (key + 100,), (key,), key + 100, key) for key in KEYS]
    recorder = trained(rounds, 400)
    told = recorder.told
    assert told <= 120, "the past of 96 updates, and two rounds"
    for update in rounds * 400:
        recorder.update(update)
    assert recorder.told == told


def test_a_generator_behind_each_fifth_update_of_a_critic_is_counted() -> None:
    critic, other = Update("DZFB", (111,), (11,), 111, 11), Update("ZFB", (112,), (12,), 112, 12)
    recorder = trained([*[critic] * 5, other], 300)
    told = recorder.told
    for update in [*[critic] * 5, other] * 300:
        recorder.update(update)
    assert recorder.told == told


def test_one_optimizer_is_known_behind_its_third_update_and_an_evaluation_is_told() -> None:
    only, evaluated = Update("ZFB", (111,), (11,), 111, 11), Update("EZFB", (111,), (11,), 111, 11)
    clock = StepClock()
    clock.optimizer_created(11)
    recorder = Recorder(clock, endless([1000]))
    for update in [only] * 500:
        recorder.update(update)
    assert recorder.told == 3
    for update in [evaluated, *[only] * 99] * 3:
        recorder.update(update)
    assert 3 < recorder.told <= 12
    recorder.settle()
    assert clock.step == 799


def test_what_makes_no_cycle_is_told_one_by_one() -> None:
    recorder = trained([Update("F" * (i + 1), (), (), 111, 11) for i in range(60)], 3)
    assert recorder.told == 180
