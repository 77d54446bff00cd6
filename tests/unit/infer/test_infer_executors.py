from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proctor.infer.executors import Executor, Lost
from proctor.infer.executors.pool import PoolExecutor
from proctor.infer.executors.serial import SerialExecutor


def double(n: int) -> int:
    return 2 * n


def refuse(n: int) -> int:
    raise ValueError(f"no {n}")


def die_of_two(n: int) -> int:
    if n == 2:
        os._exit(9)
    return n


@pytest.fixture(params=["serial", "pool"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made: Executor = SerialExecutor() if request.param == "serial" else PoolExecutor(2)
    yield made
    made.close()


def test_every_item_gives_one_result(executor: Executor) -> None:
    items = list(range(7))
    assert sorted(executor.map(double, items, [str(i) for i in items])) == [(i, 2 * i) for i in items]


def test_no_items_give_no_results(executor: Executor) -> None:
    assert list(executor.map(double, [], [])) == []


def test_what_a_function_raises_is_raised_here(executor: Executor) -> None:
    with pytest.raises(ValueError, match="no 5"):
        list(executor.map(refuse, [5], ["a"]))
    assert list(executor.map(double, [1], ["a"])) == [(0, 2)]


def test_a_worker_that_dies_costs_its_item_only() -> None:
    pool = PoolExecutor(2)
    try:
        found = dict(pool.map(die_of_two, [0, 1, 2, 3], list("abcd")))
        lost = found.pop(2)
        assert found == {0: 0, 1: 1, 3: 3}
        assert isinstance(lost, Lost) and lost.died
        assert list(pool.map(double, [4], ["c"])) == [(0, 8)]
    finally:
        pool.close()


def test_an_item_that_cannot_travel_is_lost_and_named() -> None:
    pool = PoolExecutor(1)
    try:
        ((_, lost),) = pool.map(double, [lambda: 0], ["a"])  # type: ignore[list-item]
        assert isinstance(lost, Lost) and not lost.died and "lambda" in lost.why
    finally:
        pool.close()


def test_a_worker_takes_what_it_had_before_then_what_none_had_then_any() -> None:
    pool = PoolExecutor(2)  # starts no process before there is an item
    keys = list("abcd")
    pool._home.update({"b": 1, "d": 0})
    left = [0, 1, 2, 3]
    assert [pool._take(1, left, keys) for _ in range(4)] == [1, 0, 2, 3]
    assert pool._take(1, left, keys) is None
