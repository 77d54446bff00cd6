"""The warm Python of the suite (`helpers/warm`) is to a program what an interpreter is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from helpers.warm import python

SPAWN = """
import os, sys
import torch.multiprocessing as mp

def rank(number, folder):
    open(f"{folder}/{number}", "w").write(sys.executable)

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
"""
SEEN = "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ['ASKED'], os.environ.get('HOME'), sorted(os.listdir('/proc/self/fd'))[:3])"


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        command, input="given", env={"ASKED": "1", "PYTHONPATH": str(folder)}, cwd=folder, capture_output=True, text=True, check=False, timeout=400
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("    ")]  # Python 3.13 shows the source of `-c`, too
    return done.returncode, done.stdout, "\n".join(told)


@pytest.mark.parametrize("program", [SEEN, "1/0", "import sys; sys.exit(7)", "import sys; sys.exit('why')", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_program_sees_and_ends_as_in_an_interpreter(program: str, tmp_path: Path) -> None:
    assert run([python(), "-W", "ignore", "-c", program, "a"], tmp_path) == run([sys.executable, "-W", "ignore", "-c", program, "a"], tmp_path)


def test_a_start_hook_on_the_path_acts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hook')")
    (tmp_path / "train.py").write_text("import sys, sibling\nprint(__name__, __file__, sys.argv, sibling.NAME)")
    (tmp_path / "sibling.py").write_text("NAME = 'found'")
    script = [str(tmp_path / "train.py"), "x"]
    assert run([python(), *script], tmp_path) == run([sys.executable, *script], tmp_path)


def test_ranks_that_a_program_starts_are_warm_too(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(SPAWN)
    assert run([python(), "spawn.py", str(tmp_path)], tmp_path)[0] == 0
    assert {(tmp_path / name).read_text() for name in "01"} == {python()}


def test_a_signal_reaches_the_program(tmp_path: Path) -> None:
    process = subprocess.Popen([python(), "-c", "import time; print('began', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"began\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(100) == -signal.SIGTERM
