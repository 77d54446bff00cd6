"""oracle/recording/record.py: running a command with the collector in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers.small_net import PROGRAM, program
from helpers.warm import python

from proctor.errors import OracleError, UsageError
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.running import cause
from proctor.oracle.store import ProcessInfo, Recording, write_json


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


@pytest.mark.slow
def test_a_command_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    python, script = program(tmp_path, PROGRAM.replace("range(2)", "range(10**9)"))[:2]
    command = ["sh", "-c", '"$0" "$1" 0 1 1 & echo $! > "$2"; wait', python, script, str(tmp_path / "pid")]
    assert Recorder(tmp_path / "out", command, samples=0, timeout_s=400.0).record().exit_code is None
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
    Recorder(tmp_path / "out", program(tmp_path), samples=0).record()
    assert "mine" in (tmp_path / "out" / "runs" / "clean" / "output.log").read_text()


TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     main()
[rank1]: ValueError: rank 1 has no rows
E0101 torch/distributed/elastic: failed (exitcode: 1)
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  traceback : To enable traceback see: https://pytorch.org
"""
SPAWNED = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "b.py", line 3, in train
    else:
my.Error: out of luck
"""


@pytest.mark.parametrize(
    ("text", "said"), [(TORCHRUN, ": ValueError: rank 1 has no rows"), (SPAWNED, ": my.Error: out of luck"), ("one\ntwo\n", ": one | two"), ("", "")]
)
def test_the_cause_of_an_end_is_its_tracebacks_last_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log").write_text(text)
    assert cause(tmp_path / "log") == said


@pytest.mark.parametrize(("steps", "middle", "code", "where"), [(0, False, 1, "step 1 of 2"), (1, True, 1, "step 1 of 2"), (2, True, 1, "step 2 of 2"), (2, False, 1, ""), (1, False, 0, "")])
def test_a_command_that_fails_within_a_step_has_recorded_nothing(tmp_path: Path, steps: int, middle: bool, code: int, where: str) -> None:
    class Failing(Recorder):
        def _run(self, config: CollectConfig, folder: Path) -> int:
            (folder / "rank0").mkdir()
            write_json(folder / "rank0" / "process.json", ProcessInfo(0, 1, steps=steps, done=True, open=middle))
            (folder / "output.log").write_text("Traceback (most recent call last):\n  File x\nRuntimeError: no memory\n")
            return code

    recorder = Failing(tmp_path / "out", [sys.executable], samples=0, steps=2)
    if not where:
        recorder.once("clean")
        return
    with pytest.raises(OracleError, match=f"ended with code 1 in {where}: RuntimeError: no memory") as raised:
        recorder.once("clean")
    assert raised.value.exit_code == 2 and "\n" not in raised.value.message


def test_a_command_whose_ranks_end_in_the_middle_of_a_step_is_asked_for_its_exit_code(tmp_path: Path) -> None:
    """A launcher says later than its ranks that one has failed; what they recorded until then is no step."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "raise ValueError('the batch is torn')\n"
    )
    command = ["sh", "-c", f"{python()} {script}; code=$?; sleep 1; exit $code"]
    with pytest.raises(OracleError, match="the batch is torn"):
        Recorder(tmp_path / "out", command, samples=0).record()
