"""A user's command, run unchanged with the start-up hook in its processes: started, waited for, and ended once its ranks have written everything.

`record.py`, `selfcheck/launch.py` and `prove/command.py` call `run_hooked`, each with its own mark in the environment, by which the hook knows
who listens. In: the command, a folder, what the hook reads. Out: the exit code, and in the folder what ranks and command said. No torch here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from proctor.errors import OracleError, UsageError
from proctor.instrument.record.rundir import put_hook, with_hook

POLL_S: Final = 0.05
STOP_S: Final = 5.0  # between asking the command to stop and ending it
NATURAL_S: Final = 0.3  # a command that is nearly through may end by itself
TAIL_LINES: Final = 3
LOG: Final = "output.log"

_MARKS: Final = ("PROCTOR_RUN", "PROCTOR_ORACLE", "PROCTOR_SELF", "PROCTOR_PROVE")
_TRACEBACK: Final = "Traceback (most recent call last):"
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # the first line that is not indented
_PREFIX: Final = re.compile(r"^\[[^\]\s]*\]: ?")  # of a rank
_MESSENGERS: Final = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")  # of launchers, about another traceback
_LOGGED: Final = re.compile(r"^(\[[^\]\s]*\]:)? ?[DIWEF]\d{4} [\d:.]+ ")  # by a launcher, in torch's form


def find_program(command: Sequence[str]) -> str:
    """The file that a command starts.

    Raises:
        UsageError: there is none.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: command not found")
    return program


def run_hooked(
    command: Sequence[str],
    folder: Path,
    activation: bytes,
    *,
    mark: str,
    value: str,
    variables: Mapping[str, str],
    complete: Callable[[], bool],
    look: Callable[[int, float], None],
) -> int | None:
    """Run a command once in a session of its own; what it says goes to `output.log`.

    Args:
        command: the user's.
        folder: of this run; its `boot` is what the processes start with.
        activation: what the hook reads.
        mark: variable by which the hook knows who listens; those of others are taken away.
        value: of that variable.
        variables: further ones, besides those of this process.
        complete: whether the ranks have written everything. Then the command may end by itself for a moment.
        look: gets the process's id and the seconds that it has run for, at each look; raises to end it.

    Returns:
        its exit code; `None` when it was ended because everything was there.

    Raises:
        UsageError: it cannot be started.
        OracleError: the folder cannot be written.
    """
    program = find_program(command)
    try:
        put_hook(folder / "boot", activation)
    except OSError as e:
        raise OracleError(f"{folder}: cannot be written: {e.strerror or e}", hint="choose another -o") from None
    environment = with_hook({k: v for k, v in os.environ.items() if k not in _MARKS} | dict(variables), folder / "boot")
    environment[mark] = value
    with open(folder / LOG, "wb") as output:
        try:
            process = subprocess.Popen(
                list(command), executable=program, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as e:
            raise UsageError(f"{command[0]}: cannot be run: {e.strerror or e}") from None
        with _ends_with_us():
            try:
                return _wait(process, complete, look)
            finally:
                _end(process)


@contextmanager
def _ends_with_us() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does, by an exception, so that the command, whose session is its own, is ended, too."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # it is on its way
        sys.exit(128 + number)

    ours = threading.current_thread() is threading.main_thread()
    taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if ours and signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], complete: Callable[[], bool], look: Callable[[int, float], None]) -> int | None:
    began, there = time.monotonic(), None
    while process.poll() is None:
        now = time.monotonic()
        look(process.pid, now - began)
        if there is None and complete():
            there = now
        if there is not None and now - there > NATURAL_S:
            return None
        time.sleep(POLL_S)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and whatever it started: its session is its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def cause(log: Path) -> str:
    """Why a command ended, for an error of one line: the last line of its first traceback, else its last words, before those of a launcher."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for start in (i for i, line in enumerate(lines) if _TRACEBACK in line):
        said = next((x for line in lines[start + 1 :] if _EXCEPTION.match(x := _PREFIX.sub("", line))), "")
        if said and not any(word in said for word in _MESSENGERS):
            return f": {said.strip()[:400]}"
    launcher = next((i for i, line in enumerate(lines) if _TRACEBACK in line), len(lines))  # all that are left are a launcher's
    own = [line.strip() for line in lines[:launcher] if line.strip() and not _LOGGED.match(line)]
    lines = list(dict.fromkeys(own)) or [line.strip() for line in lines if line.strip()]
    return f": {' | '.join(lines[-TAIL_LINES:])[-400:]}" if lines else ""
