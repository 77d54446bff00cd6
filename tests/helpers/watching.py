"""Looking at a run that is watched from outside."""

from __future__ import annotations

from pathlib import Path


def verifier_of(run: Path) -> int:
    """Id of the process that judges, not of the one that keeps it alive; 0 without one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"verify" in words and str(run).encode() in words and b"--keep-alive" not in words:
                return int(entry.name)
    return 0
