"""Confirms a finding in a fresh process: its script must run by itself and end with exit code 1."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from proctor.errors import OracleError
from proctor.oracle.fuzz.running.evaluate import FULL
from proctor.oracle.fuzz.sessions.journal import is_full

TIMEOUT_S: Final = 240.0
DIFFERS: Final = "not what the reference has"  # what a script says that has compared
WAITED: Final = re.compile("timed out|timeout", re.IGNORECASE)  # what a process group says once its limit is over
COMPARED: Final = "ProcessExitedException"  # what torch's launcher raises of a rank that ends with 1 by itself
DIED: Final = "terminated with signal"  # what it says of one that was ended


def confirm(script: Path, timeout_s: float = TIMEOUT_S, *, raises: str = "", compares: bool = False, hangs: bool = False, python: str = "") -> tuple[str, str]:
    """Run a finding's script.

    Args:
        script: file.
        timeout_s: for all of it.
        python: the interpreter; "" for this one.
        raises: type of the exception that it is about, "" where it is about none; another one confirms nothing.
        hangs: whether it is about ranks that wait for one another: it does not end, or the collective's own limit ends it.
        compares: whether it is about tensors that differ; an exception, which ends it with 1 as well, confirms nothing.

    Returns:
        "yes" or why not, and the end of what it printed.

    Raises:
        OracleError: the disk is full: that confirms nothing, and denies nothing.
    """
    try:
        compile(script.read_text(), str(script), "exec")
    except SyntaxError as e:  # it would end with 1 as well
        return f"its script is no program: {e}", ""
    try:
        with tempfile.TemporaryDirectory(prefix="proctor-confirm-") as folder:  # torch's launcher leaves a file there for each rank that raises
            said, tail = _ran(script, timeout_s, raises, compares, hangs, python or sys.executable, folder)
            if said != "yes" and FULL.search(tail):
                raise OSError(errno.ENOSPC, "")
            return said, tail
    except OSError as e:
        if not is_full(e):
            raise
        raise OracleError(f"{tempfile.gettempdir()}: the disk is full", hint="a finding's script runs there; make room, then --resume") from None


def _ran(script: Path, timeout_s: float, raises: str, compares: bool, hangs: bool, python: str, folder: str) -> tuple[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TMPDIR": folder}
    with subprocess.Popen(
        [python, str(script.resolve())], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=script.parent
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "yes" if hangs else f"its script does not end within {timeout_s:.0f} s", ""
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    text = said.decode(errors="replace")
    tail = text[-3000:]
    if process.returncode == 1 and hangs and not WAITED.search(text):
        return "its script ends with 1, and no collective waited in vain", tail
    if process.returncode == 1 and raises.isidentifier() and raises not in text:
        return f"its script ends with another exception than {raises}", tail
    if process.returncode == 1 and compares and "Traceback (most recent call last)" in text and COMPARED not in text:
        return "its script raises before it has compared", tail
    if process.returncode == 1 and compares and DIED in text:
        return "its ranks die before they have compared", tail
    if process.returncode == 1:
        return "yes", tail
    return f"its script ends with exit code {process.returncode}", tail
