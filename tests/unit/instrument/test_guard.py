"""What ends when an error of ours switches a part off is known, with the step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.probes import FIRST_STEPS, EarlyProbe, Probes, Sink, registry
from proctor.native import Recorder


def broken(*_: Any) -> None:
    raise ZeroDivisionError("an error of ours")


@pytest.fixture
def guard() -> Guard:
    made = Guard()
    made.step = lambda: 7
    return made


@pytest.mark.parametrize("name", sorted(registry()))
def test_of_each_probe_that_dies_its_values_end(name: str, guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    probes = Probes(Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True), guard)
    guard.ends |= probes.ends()
    probe = next(p for p in probes._probes if p.name == name)
    hook = probes._as_one([(probe, broken)])
    hook((), None)
    hook((), None, None, False)
    assert guard.ended == [(f"values {kind.name.lower()}", 7) for kind in sorted(probe.kinds)]
    assert capsys.readouterr().err.count("is off after") == 1


@pytest.mark.parametrize("name", sorted(name for name, kind in registry().items() if issubclass(kind, EarlyProbe)))
def test_hooks_of_a_probe_of_the_first_steps_run_no_more_behind_them(name: str, guard: Guard) -> None:
    recorder = Recorder()
    recorder.enabled = True
    probes = Probes(Sink(recorder, lambda: 0, RecordConfig(run=""), recorder.wants_values), guard)
    probe = next(p for p in probes._probes if p.name == name)
    ran: list[int] = []
    hook = probes._as_one([(probe, lambda *args: ran.append(1))])
    for step in range(FIRST_STEPS + 3):
        probes.step_begins(step)
        hook((), None)
    probes.closing()  # one has put a mode of torch on
    assert len(ran) == FIRST_STEPS and probe.over and guard.errors == 0


@pytest.mark.parametrize(
    ("label", "ends"),
    [
        ("state", ["states"]),
        ("hook", ["all"]),
        ("writer", ["all"]),
        ("late torch.distributed.fsdp", ["calls"]),
        ("loader worker", ["values rng"]),
        ("a probe that nobody knows", ["all"]),
        ("capsules", []),
    ],
)
def test_what_ends(label: str, ends: list[str], guard: Guard) -> None:
    told: list[None] = []
    guard.on_end = lambda: told.append(None)
    guard.run(label, broken)
    guard.run(label, broken)
    assert [what for what, _ in guard.ended] == ends
    assert len(told) == 1


def test_a_file_that_has_the_number_of_stderr_when_we_come_is_the_program_s(tmp_path: Path) -> None:
    """A program may close stderr and open a checkpoint before it imports torch, and us with it."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os\n"
        "began = os.fstat(2)\n"
        "os.close(2)\n"
        "own = open('own', 'wb')\n"
        "assert own.fileno() == 2\n"
        "from proctor.instrument import guard\n"
        "guard.began_with(began)\n"
        "guard.say('recording', gap=False)\n"
        "guard.say('not streaming')\n"
        "own.flush()\n"
        "print(guard.unsaid(), os.path.getsize('own'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "['not streaming'] 0"
