"""A rank that a signal ends is told in one line: which, by which signal, and where each was last seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

from proctor.errors import OracleError
from proctor.oracle.recording.record import Recorder
from proctor.oracle.store.ended import Whereabouts, ended

TABLE = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : here
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 77)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 77
"""


def test_a_launchers_table_names_rank_and_signal(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(TABLE)
    for rank, module in ((0, "layers.1"), (3, "layers.0.mlp")):
        (tmp_path / f"rank{rank}").mkdir()
        Whereabouts(tmp_path / f"rank{rank}").at(2, module)
    said = ended(1, tmp_path / "log", tmp_path)
    assert said == "rank 3 was ended by SIGKILL (memory ran out, or somebody ended it); last seen: rank 0 in layers.1 of step 2, rank 3 in layers.0.mlp of step 2"
    (tmp_path / "log").write_text("Exception: process 1 terminated with signal SIGSEGV")
    assert ended(1, tmp_path / "log", tmp_path).startswith("rank 1 was ended by SIGSEGV (a crash in native code)")
    (tmp_path / "log").write_text("ValueError: no signal")
    assert ended(1, tmp_path / "log", tmp_path) == ""


def test_a_program_that_is_killed_in_a_step_is_told_with_the_module_it_was_in(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch\n"
        "class Last(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(2, 2), Last(2, 2))\n"
        "net(torch.ones(1, 2)).sum().backward()\n"
    )
    with pytest.raises(OracleError, match=r"it was ended by SIGSEGV \(a crash in native code\); last seen: rank 0 in 1 of step 0"):
        Recorder(tmp_path / "out", [python(), str(script)], samples=0).record()
