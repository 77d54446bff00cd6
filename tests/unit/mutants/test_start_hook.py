"""The start-up hook of programs under test, and the process whose forks run them, without torch."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks import forks
from benchmarks.mutants.programs import HERE


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hook as a module of another name; what it puts into `sys.meta_path` is taken out again."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("SEED", "STANDIN", "PLANT", "DIGEST"):
        monkeypatch.delenv(f"MUTANTS_{name}", raising=False)
    spec = importlib.util.spec_from_file_location("start_hook", HERE / "start" / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_ends_where_an_optimizer_updates_again(hook: ModuleType) -> None:
    log = hook._Log()
    generator, critic = object(), object()
    steps = []
    for optimizer in (critic, generator, critic, generator, critic):
        log.begin_update(optimizer)
        steps.append(log.step)
    assert steps == [0, 0, 1, 1, 2]


def test_an_operator_acts_first_at_a_step(hook: ModuleType) -> None:
    log = hook._Log()
    optimizer = object()
    log.begin_update(optimizer)
    log.begin_update(optimizer)
    log.fire()
    log.begin_update(optimizer)
    log.fire()
    assert log.fired == 1


def test_it_acts_at_the_end_of_an_import_also_after_a_mere_look(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    acted: list[int] = []
    finder = hook._Finder({"imported_late": lambda module: acted.append(module.value)})
    sys.meta_path.insert(0, finder)
    assert importlib.util.find_spec("imported_late") is not None
    assert acted == []  # libraries look whether torch is there before anybody imports it
    importlib.import_module("imported_late")
    assert acted == [1]


def test_seeds_that_a_program_sets_are_moved(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    monkeypatch.setattr(random, "seed", random.seed)
    monkeypatch.setattr(numpy.random, "seed", numpy.random.seed)
    monkeypatch.setenv("MUTANTS_SEED", "2")
    given: list[int] = []

    def manual_seed(seed: int) -> None:
        given.append(seed)

    torch: Any = SimpleNamespace(manual_seed=manual_seed, random=SimpleNamespace(manual_seed=manual_seed))
    hook._seed(torch)
    torch.manual_seed(7)
    assert given == [2000, 2007]
    random.seed(7)
    moved = random.random()
    assert moved == random.Random(2007).random()


def test_the_first_failure_counts_and_waiting_ranks_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_GRACE_S", 0.1)
    failing = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], start_new_session=True)
    waiting = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert forks._wait([failing.pid, waiting.pid], 30) == 3
    failing.returncode = waiting.returncode = 0  # they were waited for


def test_what_runs_too_long_is_ended() -> None:
    waiting = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert forks._wait([waiting.pid], 0.2) == 124
    waiting.returncode = 0
