"""How much a search may cost: CPU seconds of the commands that it runs, whatever else the machine does meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

WAITING: Final = 10.0  # times the CPU seconds that may pass on the clock: commands that wait for each other use none
_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_SESSION, _TIMES = 3, slice(11, 15)  # fields of /proc/PID/stat behind the name: session; user and system time, own and of children


class Budget:
    """What is left of a search's CPU seconds.

    Args:
        cpu_s: of all commands together, every process of them.

    Attributes:
        until: when the search ends by the monotonic clock, however little it used.
    """

    def __init__(self, cpu_s: float) -> None:
        self._left_s = cpu_s
        self.until = time.monotonic() + WAITING * cpu_s

    def left_s(self, used_s: float = 0.0) -> float:
        """What is left.

        Args:
            used_s: by a command that runs.
        """
        return self._left_s - used_s

    def over(self, used_s: float = 0.0) -> bool:
        """Whether nothing is left, of CPU seconds or on the clock."""
        return self.left_s(used_s) <= 0 or time.monotonic() >= self.until

    def charge(self, used_s: float) -> None:
        """A command that used so much has ended."""
        self._left_s -= used_s


def session_cpu_s(leader: int, proc: Path = Path("/proc")) -> float:
    """CPU seconds of all processes of a session so far, with those of children that have ended; 0 where the system does not tell.

    Args:
        leader: process id of its first process.
        proc: where the system tells of processes.
    """
    total = 0
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if len(fields) > _TIMES.stop and fields[_SESSION] == str(leader):
            total += sum(map(int, fields[_TIMES]))
    return total / _TICKS
