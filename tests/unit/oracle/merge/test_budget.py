"""oracle/recording/budget.py: CPU seconds of what a search runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from proctor.errors import OracleError
from proctor.oracle.recording.budget import Budget, session_cpu_s
from proctor.oracle.recording.record import Recorder

BUSY = "import time\nwhile True: pass\n"


def test_a_session_is_told_with_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'], timeout=400)"], start_new_session=True)
    try:
        until = time.monotonic() + 400
        while session_cpu_s(child.pid) < 0.5 and time.monotonic() < until:
            time.sleep(0.05)
        assert session_cpu_s(child.pid) >= 0.5
    finally:
        subprocess.run(["kill", "-9", "--", f"-{child.pid}"], check=True)
        child.wait()


def test_where_the_system_tells_nothing_nothing_is_used(tmp_path: Path) -> None:
    assert session_cpu_s(1, tmp_path) == 0.0


def test_a_budget_is_used_up_by_cpu_seconds_or_by_the_clock() -> None:
    budget = Budget(10.0)
    assert not budget.over() and budget.over(11.0)
    budget.charge(10.0)
    assert budget.over() and Budget(0.0).over()


def test_a_command_ends_when_the_budget_is_used_up(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    recorder = Recorder(tmp_path / "out", [sys.executable, str(script)], timeout_s=400)
    recorder.budget = Budget(0.3)
    recorder.budget.until = time.monotonic() + 400
    with pytest.raises(OracleError, match="did not record"):
        recorder.record()
    assert -60 < recorder.budget.left_s() <= 0
