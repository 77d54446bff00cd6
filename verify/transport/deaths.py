"""By which signal a process of the job ended. It cannot say so itself: a crash in native code and the out-of-memory killer leave it no time.

The verifier is no parent of the job's processes, so it asks for nobody's exit status. It holds a pidfd of each, and one thread waits for them: a
process that is over but not reaped tells its status in `/proc/PID/stat` to processes of its user; of one that is reaped the kernel tells it through the pidfd
(`PIDFD_GET_INFO`, Linux 6.15). Where neither does, nothing is said. Nothing here reaches the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_EXIT: Final = 1 << 3  # PIDFD_INFO_EXIT
_INFO: Final = struct.Struct("=QQ11Ii")  # struct pidfd_info, its first version: mask, cgroup, eleven ids, exit status
_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_STATUS: Final = 49  # of the fields of /proc/PID/stat behind the name
_MOST: Final = 4096  # processes
_MEANS: Final = {
    signal.SIGSEGV: "a crash in native code", signal.SIGBUS: "a crash in native code", signal.SIGILL: "a crash in native code", signal.SIGFPE: "a crash in native code",
    signal.SIGTRAP: "a crash in native code", signal.SIGSYS: "a system call that it must not make", signal.SIGABRT: "native code gave up", signal.SIGKILL: "somebody or something ended it",
}  # fmt: skip
_OUT_OF_MEMORY: Final = "the kernel ended it because memory ran out"


@dataclass(frozen=True)
class Death:
    """A process that a signal ended.

    Args:
        process: as the verifier calls it.
        name: of the signal.
        means: in words.
    """

    process: str
    name: str
    means: str


class Deaths:
    """Waits for processes of this host to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._held: dict[int, tuple[str, int]] = {}  # pidfd: process, id
        self._found: list[Death] = []
        self._killed = _oom_kills()
        self._wake: tuple[int, int] | None = None
        self._poll = select.poll()

    def watch(self, processes: Mapping[str, int]) -> None:
        """Wait for these as well, ids by name; not for those of which that is not possible, or that are known."""
        with self._lock:
            for process, pid in processes.items():
                if process not in self._known and len(self._known) < _MOST:
                    self._known.add(process)
                    with contextlib.suppress(OSError):
                        self._hold(os.pidfd_open(pid), process, pid)

    def _hold(self, fd: int, process: str, pid: int) -> None:
        self._held[fd] = process, pid
        self._poll.register(fd, select.POLLIN)
        if self._wake is None:
            self._wake = os.pipe()
            self._poll.register(self._wake[0], select.POLLIN)
            threading.Thread(target=self._wait, name="proctor-deaths", daemon=True).start()
        os.write(self._wake[1], b".")  # who waits already does not see what is registered since

    def take(self) -> list[Death]:
        """Those since the last time."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Wait for nobody any more."""
        with self._lock:
            if self._wake is not None:
                os.write(self._wake[1], b"x")

    def _wait(self) -> None:
        assert self._wake is not None
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            with self._lock:
                for fd in ready:
                    if fd in self._held:
                        self._end(fd)
                if self._wake[0] in ready and b"x" in os.read(self._wake[0], 4096):
                    for fd in (*self._held, *self._wake):
                        os.close(fd)
                    self._held, self._wake, self._known, self._poll = {}, None, set(), select.poll()
                    return

    def _end(self, fd: int) -> None:
        process, pid = self._held.pop(fd)
        status = _status(fd, pid)
        self._poll.unregister(fd)
        os.close(fd)
        if status is None or not os.WIFSIGNALED(status):
            return
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            found = signal.Signals(number)
            kills = _oom_kills()
            if found in _MEANS:  # asked to end, as by SIGTERM, is no accident
                out = found is signal.SIGKILL and kills > self._killed
                self._found.append(Death(process, found.name, _OUT_OF_MEMORY if out else _MEANS[found]))
            self._killed = kills


def _status(fd: int, pid: int) -> int | None:
    """As `waitpid` gives it; `None` where nobody says."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return int(fields[_STATUS])
    with contextlib.suppress(OSError):
        said = _INFO.unpack(fcntl.ioctl(fd, _GET_INFO, _INFO.pack(_EXIT, *[0] * 13)))
        if said[0] & _EXIT:
            return int(said[-1])
    return None


def _oom_kills() -> int:
    """How many processes of this machine the kernel has ended because memory ran out, in any group."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    return 0
