"""Functions that do not need each other run in other processes, and what they raise comes back."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proctor.errors import OracleError
from proctor.oracle.prove.lanes.family import Unlike
from proctor.oracle.prove.lanes.spread import Forking, forking, here
from proctor.oracle.prove.machine import Misfit, Stuck


def _raises(error: Exception) -> None:
    raise error


def test_results_come_in_order() -> None:
    assert list(forking(2)([functools.partial(pow, 2, k) for k in range(5)])) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("error", [Unlike("other"), NotImplementedError("not known"), Misfit({0: "too small"}), Stuck({0: "in a", 1: "in b"}), OracleError("no", hint="yes")])
def test_what_a_process_raises_is_raised_here(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)) as caught:
        list(forking(2)([functools.partial(_raises, error), functools.partial(pow, 2, 3)]))
    assert str(caught.value) == str(error) and "Traceback" not in capfd.readouterr().err


def test_a_process_does_not_wait_for_threads_that_are_not_forked() -> None:
    text = "import torch; from proctor.oracle.prove.lanes.spread import forking; work = lambda: float(torch.ones(512, 512).tril().sum()); work(); print(list(forking(2)([work, work])))"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[131328.0, 131328.0]\n", done.stderr


def test_a_process_that_ends_early_is_said() -> None:
    with pytest.raises(OracleError, match="ended early"):
        list(forking(2)([functools.partial(os._exit, 3), functools.partial(pow, 2, 3)]))


def _noted(folder: Path, name: str, most: int) -> int:
    """How many are at it at once, this one counted; waits until so many were, and whether more come."""
    at_it, reached = folder / "at it", folder / "reached"
    at_it.mkdir(parents=True, exist_ok=True)
    (at_it / name).touch()
    until = time.monotonic() + 60
    while (found := len(list(at_it.iterdir()))) < most and not reached.exists() and time.monotonic() < until:
        time.sleep(0.01)
    if found >= most:
        reached.touch()
        time.sleep(0.2)
        found = len(list(at_it.iterdir()))
    (at_it / name).unlink()
    return found


@pytest.mark.parametrize(("jobs", "most"), [(2, 1), (3, 2)])
def test_what_runs_beside_is_one_of_the_jobs(jobs: int, most: int, tmp_path: Path) -> None:
    spread = Forking(jobs)
    with spread.beside(functools.partial(time.sleep, 60)):
        assert max(spread([functools.partial(_noted, tmp_path / "beside", str(k), most) for k in range(4)])) == most
    assert max(spread([functools.partial(_noted, tmp_path / "alone", str(k), jobs) for k in range(2 * jobs)])) == jobs


def test_what_runs_beside_does_one_thing_after_the_other(tmp_path: Path) -> None:
    spread = Forking(3)

    def several() -> list[int]:
        return [os.getpid(), *spread([os.getpid] * 3)]

    with spread.beside(several) as other:
        assert other is not None
        found = other.found()
        assert found is not None and set(found) == {other.process.pid}
    assert spread.jobs == 3


def test_what_is_not_asked_for_ends_and_ends_what_it_began(tmp_path: Path) -> None:
    def waits() -> None:
        try:
            (tmp_path / "began").touch()
            time.sleep(60)
        finally:
            (tmp_path / "ended").touch()

    began = time.monotonic()
    with Forking(2).beside(waits) as other:
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
    assert other is not None and not other.process.is_alive()
    assert (tmp_path / "ended").exists() and time.monotonic() - began < 30


@pytest.mark.parametrize("call", [functools.partial(os._exit, 3), functools.partial(_raises, ValueError("no")), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: lambda: None])
def test_what_ended_early_gives_nothing(call: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> None:
    with Forking(2).beside(call) as other:
        assert other is not None and other.found() is None
    assert "Traceback" not in capfd.readouterr().err


def test_results_that_nobody_waits_for_any_more_are_given_up() -> None:
    results = forking(2)([functools.partial(pow, 2, 3), functools.partial(time.sleep, 60)])
    began = time.monotonic()
    assert next(results) == 8
    results.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30


def test_one_job_is_this_process() -> None:
    assert forking(1) is here and list(forking(1)([os.getpid])) == [os.getpid()]
