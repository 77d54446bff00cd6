"""A job that an elastic launcher started again: what each life's ranks say is compared within that life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Run, Trace


def rank(number: int, life: int) -> dict[str, Any]:
    calls = [{"fn": "torch.optim.Optimizer.step", "step": step} for step in range(3)]
    return {"rank": number, "world": 2, "pid": 100 * life + number, "restart": life, "calls": calls}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [rank(number, life) for life in (0, 2) for number in (0, 1)])


def test_each_life_is_a_run_of_its_own(run: Path) -> None:
    trace = Run(run).trace
    assert trace.runs == [str(run), f"{run} (restart 2)"]
    assert sorted((p.run, p.rank, p.pid) for p in trace.processes) == [(0, 0, 0), (0, 1, 1), (1, 0, 200), (1, 1, 201)]
    assert _frames.replicated_runs(trace).height == 4


def test_without_lives_ranks_that_are_there_twice_are_compared_with_none(run: Path) -> None:
    trace = Trace.load([run])
    assert trace.runs == [str(run)] and not _frames.replicated_runs(trace).height


@pytest.mark.parametrize("said", [None, -1, "2", True, 1 << 40])
def test_what_makes_no_sense_is_the_first_life(tmp_path: Path, said: object) -> None:
    path = write_run(tmp_path / "run", [rank(0, 0), {**rank(1, 0), "restart": said}])
    assert Run(path).trace.runs == [str(path)]
