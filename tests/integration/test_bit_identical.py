"""A recorded run is the same run: same losses, same final parameters, same random states, bit for bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.warm import python

pytest.importorskip("torch")
import proctor

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HELPER = ROOT / "tests" / "helpers" / "run_examples.py"
MANY_PROCESSES = ("ddp_accumulate_lm", "ddp_classifier", "fsdp2_lm", "tp_dtensor")
# Weights that are computed when they are asked for, which moves a spectral norm; first, since many probes look at the first steps of a process alone.
COMPUTED = ("techniques/pipeline_checkpoint", "techniques/frozen_critic_gan")
ONE_PROCESS = [*COMPUTED, *sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in (*MANY_PROCESSES, "demo"))]


def run(command: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment["OMP_NUM_THREADS"] = "1"
    done = run_ranks(command, environment, 800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def recorded(out: Path, command: list[str]) -> str:
    return run([sys.executable, "-m", "proctor.cli", "record", "--overwrite", "-o", str(out), "--", *command])


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], dict[str, object], Path]:
    out = tmp_path_factory.mktemp("runs") / "all"
    command = [sys.executable, str(HELPER), "4", *(str(EXAMPLES / f"{name}.py") for name in ONE_PROCESS)]

    def parse(text: str) -> dict[str, object]:
        rows = [json.loads(line.removeprefix("DIGEST ")) for line in text.splitlines() if line.startswith("DIGEST ")]
        return {name: (result, state) for name, result, state in rows}

    return parse(run([python(), *command[1:]])), parse(recorded(out, command)), out


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_recording_changes_nothing(name: str, digests: tuple[dict[str, object], dict[str, object], Path]) -> None:
    bare, watched, _ = digests
    assert bare[Path(name).name] == watched[Path(name).name]


def test_the_recorded_process_was_recorded(digests: tuple[dict[str, object], dict[str, object], Path]) -> None:
    opened = proctor.open_run(str(digests[2]))
    assert opened.trace.calls.height > 1000
    assert opened.trace.states.height > 1000
    assert not opened.processes[0].notes
    assert opened.processes[0].dropped == 0


@pytest.mark.parametrize(
    "name", [name if name == "ddp_classifier" else pytest.param(name, marks=pytest.mark.slow) for name in MANY_PROCESSES]
)
def test_recording_changes_nothing_on_many_ranks(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--iters", "6"]
    bare, watched = run([python(), *command[1:]]), recorded(tmp_path / "run", command)
    assert [x for x in bare.splitlines() if x.startswith("RESULT")] == [
        x for x in watched.splitlines() if x.startswith("RESULT")
    ]
    opened = proctor.open_run(str(tmp_path / "run"))
    assert sorted(p.rank for p in opened.processes) == [0, 1]
    assert all(not p.notes and not p.dropped for p in opened.processes)
