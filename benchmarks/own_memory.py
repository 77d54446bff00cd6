"""Memory that a process has to itself; what it shares with others, as libraries, is not counted. Programs of benchmarks call it, too."""

from __future__ import annotations

from pathlib import Path


def own_mib(pid: int | str = "self") -> float:
    """MiB of a process.

    Raises:
        OSError: it has ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024
