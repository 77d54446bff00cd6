"""A Python that has torch loaded already: its programs are forks of one process, and a start takes 0.1 s of CPU, not 2.4 s.

`python()` is a path for the place of `sys.executable` in a command. Tests use it whose point is not how a process starts: what a program
computes, says and records, how it ends, and what is said of it. Environment, folder, arguments, descriptors, exit code and signals are those of a
process of its own (`server.py`), and so are interpreters that the program starts (torchrun's ranks). Not so: imports of torch that a program makes
are over when it begins, so what patches at the end of `import torch` does so earlier, and who asks for the parent of a process gets the server.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent


@cache
def python() -> str:
    """Path of the interpreter; its server starts at the first call of a process, and ends with that process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(folder / "socket"), str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return str(program)
