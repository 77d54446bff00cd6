"""oracle/record.py: running a command with the collector in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers.small_net import PROGRAM, program

from proctor.errors import UsageError
from proctor.oracle.record import Recorder
from proctor.oracle.store import Recording


def result(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("RESULT ")]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_recorded_program_computes_the_same_bits(tmp_path: Path) -> None:
    command = program(tmp_path)
    bare = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    info = Recorder(tmp_path / "out", command, samples=1, to_the_end=True).record()
    clean, noisy = ((tmp_path / "out" / "runs" / run / "output.log").read_text() for run in ("clean", "noise-0"))
    assert result(bare) and result(bare) == result(clean)
    assert result(noisy) != result(clean)
    assert (info.world, info.samples, info.exit_code, info.program) == (1, 1, 0, "train.py")
    assert Recording(tmp_path / "out").runs() == ["again", "clean", "noise-0"]


def test_a_command_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    python, script = program(tmp_path, PROGRAM.replace("range(2)", "range(10**9)"))[:2]
    command = ["sh", "-c", '"$0" "$1" 0 1 1 & echo $! > "$2"; wait', python, script, str(tmp_path / "pid")]
    assert Recorder(tmp_path / "out", command, samples=0, timeout_s=90.0).record().exit_code is None
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_earlier_recording_is_kept_unless_told(tmp_path: Path) -> None:
    command = program(tmp_path)
    Recorder(tmp_path / "out", command)
    with pytest.raises(UsageError, match="already"):
        Recorder(tmp_path / "out", command)
    Recorder(tmp_path / "out", command, overwrite=True)


@pytest.mark.slow
def test_processes_that_do_not_train_are_left_alone(tmp_path: Path) -> None:
    helper = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)\n"
    Recorder(tmp_path / "out", program(tmp_path, helper + PROGRAM), samples=0).record()
    assert [p.name for p in (tmp_path / "out" / "runs" / "clean").glob("rank*")] == ["rank0"]


@pytest.mark.slow
def test_the_users_own_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    Recorder(tmp_path / "out", [sys.executable, *program(tmp_path)[1:]], samples=0).record()
    assert "mine" in (tmp_path / "out" / "runs" / "clean" / "output.log").read_text()
