"""Processes around a job: the verifier is started, a process is told from a later one of its id, notices are delivered after the end.

`proctor watch` and the verifier call this. Nothing here waits for the job, and the job never waits for what is started here.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proctor.errors import ProctorError, TraceError
from proctor.invariants.wire.peer import connect, parse_address
from proctor.verify.service.settings import Settings


def watched_now(run: Path) -> bool:
    """Whether a verifier is at work on this run."""
    try:
        connect(parse_address(f"unix:{run / 'verify' / 'live' / 'socket'}"), 1.0).close()
    except (OSError, ProctorError):
        return False
    return True


def begin(settings: Settings, pid: int, *, aloud: bool, apart: bool) -> subprocess.Popen[bytes] | None:
    """Start a verifier for the job that is, or is about to be, this process.

    Args:
        aloud: it says on our stderr what it finds; else in `RUN/verify/verifier.log`, so that a pipe that the job's output
            goes to ends with the job.
        apart: it is no child of ours, so that a job that waits for all its children does not wait for it.

    Returns:
        the process, unless it is apart.

    Raises:
        TraceError: the run directory cannot be written, or no process can be made.
    """
    settings.pid, settings.started = pid, start_time(pid)
    settings.write()
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PROCTOR_RUN", None)
    command = [sys.executable, "-P", "-m", "proctor.cli", "verify", settings.run, "--keep-alive"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if aloud else log,
            start_new_session=True,
        )

    try:
        with open(settings.folder / "verifier.log", "ab", opener=_owner_s) as log:
            if not apart:
                return start()
            _orphan(start)
    except OSError as e:
        raise TraceError(f"{settings.folder}: the verifier was not started: {e.strerror or e}") from None
    return None


def deliver_later(settings: Settings, limit_s: float) -> int:
    """Go on delivering what waits in the outbox, in a process of its own that ends when nothing waits, or after a while.

    Returns:
        its id; 0 where it could not be started, or there is no time for it.
    """
    if limit_s < 1:
        return 0
    command = [sys.executable, "-P", "-m", "proctor.cli", "page", "flush", "--run", settings.run, "--config", settings.page]
    nothing = subprocess.DEVNULL
    try:
        with open(settings.folder / "verifier.log", "ab", opener=_owner_s) as log:
            return _orphan(
                lambda: subprocess.Popen(
                    [*command, "--timeout", f"{int(limit_s)}s"], stdin=nothing, stdout=log, stderr=log, start_new_session=True
                )
            )
    except OSError:
        return 0


def _owner_s(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _orphan(start: Callable[[], subprocess.Popen[bytes]]) -> int:
    """Start a process through one that ends at once; its id. Raises OSError."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(send, str(start().pid).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    with open(receive, "rb") as told:
        said = told.read(32)
    if os.waitpid(pid, 0)[1]:
        raise OSError("no process could be made")
    return int(said)


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is none. Tells a process from a later one of its id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class Going:
    """Whether a process runs, told from a later one of the same id by its start time."""

    def __init__(self, pid: int, started: int) -> None:
        self._fd = -1
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        if start_time(pid) == started:
            self._fd = fd
        else:
            os.close(fd)

    def __call__(self) -> bool:
        return self._fd >= 0 and not select.select([self._fd], [], [], 0)[0]


def say(text: str) -> None:
    """One line for whoever watches the terminal, which may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(f"proctor: {text}", file=sys.stderr, flush=True)
