"""A budget keeps its share, looks at everything within a bound, and all ranks look at the same steps."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from proctor.instrument.budget import BLOCK, FOCUS, MAX_LEVEL, Budget, longest_gap, looks_at, next_chosen
from proctor.instrument.observe.sentinel import Sentinel, turn_of


class Clock:
    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def run(budget: Budget, clock: Clock, steps: range, *, bare: float, full: float, thin: float, hidden: float = 0.0) -> list[int]:
    """Steps that were looked at, of a process whose steps cost so many seconds; `hidden`: by which a look slows the program itself."""
    looked = []
    for step in steps:
        if budget.next_step(step, 0):
            looked.append(step)
        own = full if budget.looking else thin
        budget.meter.seconds += own
        clock.now += bare + own + hidden * budget.looking
    return looked


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_every_window_has_one_block_and_the_gap_is_bounded(level: int) -> None:
    blocks = [b for b in range(16 << MAX_LEVEL) if looks_at(b * BLOCK, level)]
    assert len(blocks) == (16 << MAX_LEVEL) >> level
    assert {b >> level for b in blocks} == set(range(len(blocks)))
    gaps = [BLOCK * (b - a - 1) for a, b in pairwise(blocks)]
    assert max(gaps) <= longest_gap(level)
    assert level < 3 or len({b % (1 << level) for b in blocks}) > min(1 << level, len(blocks)) // 2, "it would keep time with the program"


def test_the_first_seconds_are_looked_at_in_full_too() -> None:
    clock = Clock()
    budget = Budget(0.01, 20, clock=clock, free_s=1.0, now=clock)
    looked = run(budget, clock, range(400), bare=0.01, full=0.004, thin=0.0001)
    whole = next(step for step in range(400) if step not in looked)
    assert 1.0 <= whole * 0.014 < 1.1, "every step of the first second, more than the 20"
    assert len(looked) < whole + 60
    assert Budget(0.01, 20, clock=clock).free == 20, "without seconds only the steps count"


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_the_next_look_is_the_next(level: int) -> None:
    chosen = [step for step in range(16_000) if looks_at(step, level)]
    for step in range(0, chosen[-1], 29):
        assert next_chosen(step, level) == next(c for c in chosen if c >= step)


@pytest.mark.parametrize(("level", "pause"), [(0, 0), (3, 0), (3, 2), (5, 4), (2, 6)])
def test_every_piece_has_its_turn_within_a_round_whenever_a_rank_glances(level: int, pause: int) -> None:
    around = 1 << (level + pause + (level > 0 and pause < 6))
    for begin in (0, 1, 12_345):
        turns = {turn_of(step) % (1 << level) for step in range(begin, begin + around) if not step % (1 << pause)}
        assert turns == set(range(1 << level))


def test_what_is_looked_at_rarely_is_looked_at_by_all_who_look_more_often() -> None:
    for step in range(5_000):
        looks = [looks_at(step, level) for level in range(MAX_LEVEL + 1)]
        assert looks == sorted(looks, reverse=True)


@pytest.mark.parametrize(("full", "thin"), [(0.1, 0.0), (0.5, 0.001), (2.0, 0.002)])
def test_the_share_is_kept(full: float, thin: float) -> None:
    """A step of one second of which `full` more is ours when it is looked at."""
    clock = Clock()
    budget = Budget(0.05, 20, clock=clock)
    run(budget, clock, range(4_000), bare=1.0, full=full, thin=thin)
    own, other = budget.since_free
    assert own / other <= 0.06
    assert budget.looked > 20 + 4_000 // (BLOCK << MAX_LEVEL) // 2


@pytest.mark.parametrize(("bare", "gap"), [(1.0, 6_138), (0.012, 6_138), (0.009, 12_282), (0.002, 49_146), (0.0001, 49_146)])
def test_short_steps_have_more_of_them_without_a_look_but_no_more_than_two_minutes(bare: float, gap: int) -> None:
    """A look that costs as much as a hundred steps."""
    clock = Clock()
    budget = Budget(0.01, 20, clock=clock, now=clock)
    run(budget, clock, range(60_000), bare=bare, full=100 * bare, thin=0.0)
    assert budget.facts()["overhead"]["delay"] == gap
    assert gap == longest_gap(MAX_LEVEL) or gap * bare <= 120.0


def test_what_a_look_throws_out_of_caches_is_of_the_share_too() -> None:
    clock = Clock()
    budget = Budget(0.05, 20, clock=clock)
    looked = run(budget, clock, range(8_000), bare=1.0, full=0.5, thin=0.0, hidden=1.0)
    assert 1.5 * len([step for step in looked if step >= 20]) / 8_000 <= 0.06


def test_steps_that_are_long_by_themselves_do_not_end_the_looks() -> None:
    clock = Clock()
    budget = Budget(0.05, 20, clock=clock)
    run(budget, clock, range(8_000), bare=1.0, full=0.1, thin=0.0, hidden=50.0)
    assert budget.level <= 4, "as if a look cost three times what it measures of itself"


def test_what_costs_less_than_the_budget_is_looked_at_always() -> None:
    clock = Clock()
    budget = Budget(0.05, 10, clock=clock)
    assert run(budget, clock, range(500), bare=1.0, full=0.02, thin=0.0) == list(range(500))


def test_without_a_share_it_only_measures() -> None:
    clock = Clock()
    budget = Budget(0.0, 10, clock=clock)
    assert len(run(budget, clock, range(100), bare=1.0, full=9.0, thin=9.0)) == 100
    assert budget.facts()["overhead"]["seconds"] == 900.0


def test_what_is_wrong_brings_the_full_look_back_for_a_while() -> None:
    clock = Clock()
    budget = Budget(0.01, 10, clock=clock)
    run(budget, clock, range(2_000), bare=1.0, full=1.0, thin=0.0)
    budget.wake()
    looked = run(budget, clock, range(2_000, 2_000 + 2 * FOCUS), bare=1.0, full=1.0, thin=0.0)
    assert set(range(2_000, 2_000 + FOCUS)) <= set(looked) and len(looked) < 2 * FOCUS


def test_the_time_of_hooks_within_hooks_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("proctor.instrument.budget.time.thread_time", clock)
    budget = Budget(0.01, 10)

    def wait() -> None:
        clock.now += 2.0

    inner = budget.meter.around(wait)
    budget.meter.around(lambda: inner())()
    assert budget.meter.seconds == 2.0
    with pytest.raises(ZeroDivisionError):
        budget.meter.around(lambda: 1 / 0)()
    budget.meter.around(wait)()
    assert budget.meter.seconds == 4.0


class Tracker:
    """What a sentinel asks of a tracker."""

    layout = 1
    names: dict[int, str] = {}  # noqa: RUF012

    def __init__(self, *parameters: Any) -> None:
        self.all = [(id(p), p) for p in parameters]
        self.rests: set[int] = set()

    def parameters(self) -> list[tuple[int, Any]]:
        return self.all

    def has_no_rate(self, key: int) -> bool:
        return key in self.rests


@pytest.fixture
def sentry() -> Any:
    parameters = [torch.nn.Parameter(torch.full((4,), float(i + 1))) for i in range(3)]
    for p in parameters:
        p.grad = torch.ones(4)
    budget = Budget(0.5, 0)
    for _ in range(4):
        budget._bare.add(1e6)  # room for all at once
    return parameters, budget, Sentinel(Tracker(*parameters), budget)  # type: ignore[arg-type]


def glances(sentinel: Sentinel, parameters: list[Any], *, move: bool, number: int = 8) -> None:
    for step in range(number):
        if move:
            with torch.no_grad():
                for p in parameters:
                    p.sub_(0.01 * p.grad)
        sentinel.glance(step)


def test_what_is_well_wakes_nobody(sentry: Any) -> None:
    parameters, budget, sentinel = sentry
    glances(sentinel, parameters, move=True)
    assert not budget._woken and sentinel.round == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_wakes(sentry: Any, value: float) -> None:
    parameters, budget, sentinel = sentry
    with torch.no_grad():
        parameters[1][2] = value
    glances(sentinel, parameters, move=True)
    assert budget._woken


def test_a_parameter_that_does_not_move_wakes_once(sentry: Any) -> None:
    parameters, budget, sentinel = sentry
    glances(sentinel, parameters, move=False)
    assert budget._woken
    budget._woken = False
    glances(sentinel, parameters, move=False)
    assert not budget._woken


def test_of_several_updates_in_a_step_only_the_first_has_a_glance(sentry: Any) -> None:
    parameters, budget, sentinel = sentry
    for step in range(8):
        for p in parameters:  # each moved by an optimizer of its own
            with torch.no_grad():
                p.sub_(0.01 * p.grad)
            sentinel.glance(step)
    assert not budget._woken and [row[0] for row in sentinel.take().rows] == [step for step in range(8) for _ in parameters]


def test_what_has_nothing_to_move_it_may_rest(sentry: Any) -> None:
    parameters, budget, sentinel = sentry
    parameters[0].grad, parameters[1].grad = None, torch.zeros(4)
    sentinel._tracker.rests.add(id(parameters[2]))
    glances(sentinel, parameters, move=False)
    assert not budget._woken


def test_a_sentinel_keeps_no_parameter_alive(sentry: Any) -> None:
    parameters, _, sentinel = sentry
    sentinel.glance(0)
    gone = weakref.ref(parameters[0])
    sentinel._tracker.all = []
    del parameters[:]
    assert gone() is None
    sentinel.glance(1)
