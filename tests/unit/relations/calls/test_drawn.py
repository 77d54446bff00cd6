"""`contain`: what a call contains a drawn number of times may be none of it in a healthy run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations.contain import EventContain
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

RELATION = EventContain()
FETCH, CROP = "loader.Fetcher.fetch", "transforms.Crop.forward"
IMAGES = 4
Times = Callable[[Random], list[int]]


def fetching(path: Path, times: Times, steps: int = 28, seed: int = 0) -> Trace:
    """Each step fetches once; `times` gives, of each line of the fetch, how often it crops."""
    random, calls = Random(seed), list[dict[str, Any]]()
    for step in range(steps):
        calls.append({"fn": FETCH, "step": step, "args": {"a": [], "k": {}}})
        parent = len(calls)
        for line, n in enumerate(times(random)):
            calls += [{"fn": CROP, "step": step, "parent": parent, "args": {"a": [], "k": {}}, "site": f"loader.py:{20 + line}"}] * n
    return Trace.load([write_run(path, [{"calls": calls}], program="train.py")])


def coins(random: Random) -> int:
    return sum(random.random() < 0.5 for _ in range(IMAGES))


def never_none(random: Random) -> list[int]:
    """What a coin gives for each image, in a run in which it gives no batch without a crop: one in sixteen has none."""
    return [max(1, coins(random))]


def rules_on(trace: Trace) -> set[tuple[str, str]]:
    return {(h.text("parent"), h.text("child")) for h in RELATION.propose(trace) if h["kind"] == "call"}


def test_what_chance_may_leave_out_is_no_rule(tmp_path: Path) -> None:
    learned = fetching(tmp_path / "a", never_none)
    rules = infer(learned, [RELATION], strict=True)[0]
    other = fetching(tmp_path / "b", lambda _: [0])
    assert not check(other, [Pack(rules)], relations={"contain": RELATION}).violations


def test_what_is_called_as_often_each_time_is_a_rule(tmp_path: Path) -> None:
    assert (FETCH, CROP) in rules_on(fetching(tmp_path / "a", lambda _: [IMAGES]))


def test_a_line_that_calls_it_once_each_time_makes_a_rule_whatever_others_draw(tmp_path: Path) -> None:
    assert (FETCH, CROP) in rules_on(fetching(tmp_path / "a", lambda random: [coins(random), 1]))


def test_one_of_two_lines_each_time_makes_a_rule(tmp_path: Path) -> None:
    def either(random: Random) -> list[int]:
        first = random.random() < 0.5
        return [int(first), int(not first)]

    assert (FETCH, CROP) in rules_on(fetching(tmp_path / "a", either))


def test_a_loop_that_is_long_is_not_empty_by_chance(tmp_path: Path) -> None:
    assert (FETCH, CROP) in rules_on(fetching(tmp_path / "a", lambda random: [random.randint(20, 60)]))


def test_an_evaluation_calls_it_less_often_and_each_time(tmp_path: Path) -> None:
    calls = list[dict[str, Any]]()
    for step in range(12):
        for phase, n in (("train", 2), ("eval", 1)):
            where = {"step": step, "phase": phase, "args": {"a": [], "k": {}}}
            calls.append({"fn": FETCH, **where})
            calls += [{"fn": CROP, "parent": len(calls), "site": "loader.py:20", **where}] * n
    assert (FETCH, CROP) in rules_on(Trace.load([write_run(tmp_path / "a", [{"calls": calls}], program="train.py")]))


def test_where_many_calls_without_it_were_to_be_expected_there_is_one_at_least(tmp_path: Path) -> None:
    assert (FETCH, CROP) in rules_on(fetching(tmp_path / "a", never_none, steps=400))


def test_what_is_drawn_is_counted_over_runs(tmp_path: Path) -> None:
    """Half of the calls in each of two runs say what all say in one."""
    halves = [fetching(tmp_path / f"{seed}", never_none, steps=200, seed=seed) for seed in (1, 2)]
    both = RELATION.merge([RELATION.survey(half) for half in halves])
    assert not any(h.text("child") == CROP for h in RELATION.settle(RELATION.survey(fetching(tmp_path / "few", never_none, steps=40))))
    assert any(h.text("child") == CROP for h in RELATION.settle(both))
