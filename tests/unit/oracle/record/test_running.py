"""The command that the oracle runs ends with the one who asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
place.with_suffix(".part").write_text(str(os.getpid()))
place.with_suffix(".part").rename(place)
time.sleep(300)
"""
WAIT_S = 120


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_us_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """Before, it ran on: its session is its own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    place = tmp_path / "pid"
    ours = subprocess.Popen([sys.executable, "-m", "proctor.cli", "oracle", "self", "--", sys.executable, str(tmp_path / "program.py"), str(place)], stderr=subprocess.PIPE, cwd=tmp_path)
    try:
        end = time.monotonic() + WAIT_S
        while not place.exists() and ours.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        pid = int(place.read_text())
        ours.send_signal(number)
        _, said = ours.communicate(timeout=WAIT_S)
    finally:
        ours.kill()
    assert ours.returncode == 128 + number, said
    assert b"Traceback" not in said
    end = time.monotonic() + WAIT_S
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(pid)
