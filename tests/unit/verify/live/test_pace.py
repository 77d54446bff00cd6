"""Rounds that are not urgent take a small part of the time, and wait a bounded while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.live.flushes import flushes
from helpers.loops import loop
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check
from proctor.verify.live.memo import Looks
from proctor.verify.live.online import OnlineChecker
from proctor.verify.live.pace import MOST_S, Pace

KNOWN = {name: registry()[name] for name in ("contain", "sequence")}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("healthy")
    paths = [write_run(folder / f"run{i}", [loop(steps=8)]) for i in range(2)]
    return Pack(infer(Trace.load(paths), list(KNOWN.values()), strict=True)[0])


@pytest.mark.parametrize(("spent", "waits"), [(0.001, 0.0), (0.1, 0.9), (0.4, 3.6), (2.0, MOST_S)])
def test_what_took_long_waits_for_long_but_not_for_ever(spent: float, waits: float) -> None:
    pace = Pace(share=0.1)
    assert pace.due(100.0)
    pace.took(spent / 2)
    pace.took(spent / 2)
    pace.over(100.0, found=False)
    assert pace.due(100.0 + waits + 1e-6)
    assert waits == 0.0 or not pace.due(100.0 + waits - 1e-6)


def test_what_found_something_is_looked_after_at_once() -> None:
    pace = Pace()
    pace.took(5.0)
    pace.over(100.0, found=True)
    assert pace.due(100.0)


def test_steps_that_wait_are_judged_at_once_when_their_turn_has_come(tmp_path: Path, pack: Pack) -> None:
    """A pause loses nothing: the same is found, in fewer rounds."""
    path = write_run(tmp_path / "run", [loop(steps=40, skip={30: ["backward"]})])
    at_once = OnlineChecker([pack], relations=KNOWN, pace=Pace(most_s=0.0))
    waits = OnlineChecker([pack], relations=KNOWN, pace=Pace(share=1e-9, most_s=1e9))
    numbers = {}
    for name, checker in (("at once", at_once), ("waits", waits)):
        rounds = 0
        for process, part, info, reached in flushes(path):
            checker.live.add(process, part, info, reached)
            rounds += len(list(checker.rounds(some=True)))
        numbers[name] = rounds + len(checker.finish())
    assert numbers["waits"] < numbers["at once"]
    assert {v.id for v in waits.result().violations} == {v.id for v in at_once.result().violations} != set()
    assert waits.judged == at_once.judged


@pytest.mark.parametrize(("steps", "looked"), [(60, True), (100, False)])
def test_a_window_that_is_too_long_to_come_again_is_not_remembered(steps: int, looked: bool, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no step of it is looked at for what it looks like; the same is found."""
    asked: list[int] = []
    key = Looks.key
    monkeypatch.setattr(Looks, "key", lambda self, window, *args, **kwargs: asked.append(window.now) or key(self, window, *args, **kwargs))
    path = write_run(tmp_path / "run", [loop(steps=steps, skip={30: ["backward"]})])
    checker = OnlineChecker([pack], relations=KNOWN)
    for process, part, info, reached in flushes(path):
        checker.live.add(process, part, info, reached)
    found = {v.id for one in checker.rounds() for v in one.violations}
    assert bool(asked) == looked
    assert found == {v.id for v in check(Trace.load([path]), [pack], relations=KNOWN).violations} != set()


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import proctor.instrument.record.writer, proctor.instrument.record.stream, proctor.instrument.capsules", ("polars", "pandas")),
        ("from proctor.verify.memory import forgo_pandas; forgo_pandas(); import pyarrow; pyarrow.array([1, 2])", ("pandas",)),
        ("import proctor.verify.service.verifier, proctor.verify.live.contexts; proctor.verify.live.contexts.Contexts()", ("pandas",)),
    ],
)
def test_processes_import_only_what_they_need(program: str, unwanted: tuple[str, ...]) -> None:
    check = f"{program}; import sys; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pandas_is_there_for_others() -> None:
    program = "from proctor.verify.memory import forgo_pandas; forgo_pandas(); import pandas; print(pandas.DataFrame({'a': [1]}).shape)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(1, 1)"
