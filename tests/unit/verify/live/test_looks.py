"""Windows of a run that repeats itself have equal keys; what a relation may depend on makes them differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.live.flushes import flushes
from helpers.runs import write_run

from proctor.invariants.relations import Reads
from proctor.invariants.schema import CONTEXT
from proctor.invariants.trace.windows import Window
from proctor.verify.live.contexts import Contexts
from proctor.verify.live.memo import Looks
from proctor.verify.live.records import LiveTrace

VAR = {"model": "Net", "module": "Linear", "kind": "weight", "role": "parameter", "attr": "data"}
META = {"dtype": "float32", "shape": [2]}
STEPS = 24


def rank_that_trains(
    rank: int, *, unlike: range = range(0), again: int = -1, lazy: bool = False, asked: Callable[[int], str] = lambda step: ""
) -> dict[str, Any]:
    """One of several replicas.

    Args:
        unlike: steps whose parameters are those of no other rank.
        again: a step whose parameter is that of the step before.
        lazy: the second parameter changes in the first ten steps only.
        asked: what a schedule is given in a step, and gives back.
    """
    calls: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    for step in range(-1, STEPS):
        calls.append({"fn": "main" if step < 0 else "torch.optim.Optimizer.step", "step": step})
        if asked(step):
            calls.append({"fn": "schedule", "step": step, "args": f'{{"a":[{asked(step)}],"k":{{}}}}', "ret": asked(step)})
        for i, name in enumerate(("fc.weight", "ln.weight")):
            if lazy and i and step > 10:
                continue
            value = 1000 + 10 * (step - (step == again)) + i + (100_000 * rank if step in unlike else 0)
            seq = len(calls)
            states.append({"var": {**VAR, "name": name}, "step": step, "seq": seq, "call": seq, "edge": 1, "fp": value, "meta": META})
    return {"rank": rank, "world": 2, "calls": calls, "states": states}


def keys(path: Path, reads: Reads, *, alone: bool = False, measures: frozenset[str] = frozenset()) -> list[bytes]:
    """Of the window of each step, looked at when the step is over."""
    live = LiveTrace("run", "program")
    looks = Looks(live)
    found = []
    for number, (process, part, info, reached) in enumerate(flushes(path)):
        live.add(process, part, info, reached)
        if number % 2 and reached > 0:
            live.settle()
            now = reached - 1
            live.forget(now - 4)
            found.append(looks.key(Window(now - 1, now + 1, 3, now), reads, alone=alone, measures=measures))
    return found


def both(tmp: Path, **second: Any) -> Path:
    return write_run(tmp / "run", [rank_that_trains(0), rank_that_trains(1, **second)])


@pytest.mark.parametrize("reads", ["calls", "records", "draws"])
def test_steps_that_repeat_look_alike(tmp_path: Path, reads: Reads) -> None:
    found = keys(both(tmp_path), reads)
    assert len(set(found[9:])) == 1 and found[0] != found[-1]


def test_a_replica_that_differs_is_seen_across_ranks_only(tmp_path: Path) -> None:
    path = both(tmp_path, unlike=range(15, 16))
    steady = keys(path, "records")[14]
    new = [step for step, key in enumerate(keys(path, "records")) if step > 9 and key != steady]
    assert new[0] == 15 and set(new) <= set(range(15, 21))
    assert len(set(keys(path, "records", alone=True)[9:])) == len(set(keys(path, "calls")[9:])) == 1


@pytest.mark.parametrize("reads", ["calls", "records", "draws"])
@pytest.mark.parametrize("asked", [str, lambda step: f'{{"T":"int64","s":[{step + 8},4],"d":"cpu"}}'], ids=["numbers", "sizes"])
def test_numbers_that_calls_are_given_matter_to_those_that_measure_them(tmp_path: Path, reads: Reads, asked: Callable[[int], str]) -> None:
    path = both(tmp_path, asked=asked)
    assert len(set(keys(path, reads)[9:])) == len(set(keys(path, reads, measures=frozenset({"other"}))[9:])) == 1
    found = keys(path, reads, measures=frozenset({"schedule", "other"}))
    assert len(set(found)) == len(found)


def test_words_and_kinds_that_calls_are_given_matter_to_all(tmp_path: Path) -> None:
    def asked(step: int) -> str:
        return {15: '"warm"', 17: "0.5", 19: "true"}.get(step, "3")

    found = keys(both(tmp_path, asked=asked), "calls")
    assert len({found[14], *found[15:20]}) > 4 and found[14] == found[13]


def test_a_value_that_stays_is_seen_by_every_kind(tmp_path: Path) -> None:
    path = both(tmp_path, again=15)
    for alone in (True, False):
        found = keys(path, "records", alone=alone)
        assert found[15] != found[14] == found[-1]


def test_a_variable_that_is_not_written_any_more_does_not_make_every_window_new(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [rank_that_trains(rank, lazy=True) for rank in range(2)])
    assert len(set(keys(path, "records")[18:])) == 1


def test_rows_that_come_late_make_another_window(tmp_path: Path) -> None:
    live = LiveTrace("run", "program")
    looks = Looks(live)
    told = [one for one in flushes(both(tmp_path)) if one[3] <= 13]
    late = told[-4]
    assert late[3] == 12
    for process, part, info, reached in told:
        live.add(process, part if part is not late[1] else {t: r for t, r in part.items() if t != "states"}, info, reached)
    live.settle()
    window = Window(11, 13, 3, 12)
    before = [looks.key(window, reads) for reads in ("calls", "records")]
    live.add(late[0], {"states": late[1]["states"]})
    live.settle()
    assert all(a != b for a, b in zip(before, [looks.key(window, reads) for reads in ("calls", "records")], strict=True))


def test_what_is_older_than_a_window_is_the_same_by_steps_and_at_once(tmp_path: Path) -> None:
    """A window's key does not depend on which windows were looked at before."""
    path = write_run(tmp_path / "run", [rank_that_trains(rank, lazy=True) for rank in range(2)])
    live = LiveTrace("run", "program")
    for process, part, info, reached in flushes(path):
        live.add(process, part, info, reached)
    live.settle()
    windows = [Window(now - 1, now + 1, 3, now) for now in range(10, STEPS)]
    one = Looks(live)
    assert [one.key(w, "records") for w in windows] == [Looks(live).key(w, "records") for w in windows]


def held(path: Path) -> LiveTrace:
    live = LiveTrace("run", "program")
    for process, part, info, reached in flushes(path):
        live.add(process, part, info, reached)
    live.settle()
    return live


@pytest.mark.parametrize("asked", [range(STEPS), range(STEPS - 1, -1, -1), [9, 9, 4, 12, 5, 13, 6, 14, 7, 15, 8, 9, 2, 16]])
def test_the_last_states_are_the_same_whatever_was_asked_before(tmp_path: Path, asked: Sequence[int]) -> None:
    path = write_run(tmp_path / "run", [rank_that_trains(rank, lazy=True) for rank in range(2)])
    live = held(path)
    for before in asked:
        found, wanted = live.older(before), held(path).older(before)
        assert all((found[name] == wanted[name]).all() for name in ("proc", "var", "fp", "seq"))
        assert live.older(before) is found


def test_states_that_come_late_or_are_let_go_are_in_the_last_ones(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [rank_that_trains(rank, lazy=True) for rank in range(2)])
    live, name = held(path), next(iter(held(path).members))
    before = dict(live.older(12))
    late = next(part["states"] for process, part, _, reached in flushes(path) if process == name and reached == 9)
    live.add(name, {"states": late})
    live.settle()
    assert sorted(live.older(12)["fp"]) == sorted(before["fp"]) and live.older(12) is not before
    live.forget(10)
    assert sorted(live.older(12)["fp"]) == sorted(before["fp"])


def test_rows_that_are_held_are_counted(tmp_path: Path) -> None:
    live = held(both(tmp_path))
    of_step = {step: sum(len(r["seq"]) for t in ("calls", "states", "values") if (r := live.rows_of(t, step)) is not None) for step in live.revisions}
    assert live.rows == sum(of_step.values()) > 0
    live.forget(10)
    assert live.rows == sum(rows for step, rows in of_step.items() if step < 3 or step >= 10)


def test_contexts_that_are_told_anew_replace_the_old_ones() -> None:
    contexts = Contexts()

    def tell(rows: Sequence[tuple[int, int, int]]) -> None:
        procs = np.array([proc for _, proc, _ in rows], dtype=np.uint16)
        rest = {"micro": 0, "grad": True, "recompute": False} | dict.fromkeys(("phase", "autocast", "outer", "meta"), "")
        told = [{"ctx": ctx, "step": step, **rest} for ctx, _, step in rows]
        contexts.add(procs, pa.RecordBatch.from_pylist(told, schema=CONTEXT))

    tell([(7, 1, 3), (5, 0, 2)])
    tell([(5, 0, 4), (6, 0, 5)])
    steps, looks = contexts.of(np.array([5, 6, 1 << 32 | 7, 9], dtype=np.uint64))
    assert steps.tolist() == [4, 5, 3, -1] and looks[3] == 0
    assert len(set(looks[:3].tolist())) == 1  # they say the same but for the step
    assert contexts.frame()["step"].to_list() == [4, 5, 3]
