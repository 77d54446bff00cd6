"""A command starts with the signals ignored that were ignored when Proctor was started, no more and no fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = [sys.executable, "-c", "print(next(x for x in open('/proc/self/status') if x.startswith('SigIgn')))"]
GLIBC = 0b11 << 31  # 32 and 33, which glibc keeps for itself: a program that it spawns has them ignored, and Python 3.13 lets it spawn
SHELL = ["sh", "-c", "grep SigIgn /proc/self/status"]


def ignored(words: list[str], *numbers: int) -> int:
    def before() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)

    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=before, restore_signals=False, timeout=400, check=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    return int(done.stdout.split()[1], 16) & ~GLIBC


@pytest.mark.parametrize("action", [("record",), ("watch",), ("watch", "--fail-on", "never")], ids=" ".join)
def test_ignored_signals_are_those_of_the_bare_command(tmp_path: Path, action: tuple[str, ...]) -> None:
    for i, numbers in enumerate([(), (signal.SIGINT, signal.SIGHUP)]):
        command = [sys.executable, "-m", "proctor.cli", *action, "-o", str(tmp_path / f"run{i}"), "--", *SHELL]
        assert ignored(command, *numbers) == ignored(SHELL, *numbers)
