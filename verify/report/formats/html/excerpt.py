"""Source lines around a place that a trace names, for a report.

A trace is data from somebody else as often as not, and a report is shared: only Python sources that the trace
itself names as call sites are read, and only regular, small, text files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AROUND: Final = 4  # lines before and after
MAX_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True)
class Line:
    number: int
    text: str
    here: bool


def excerpt(source: str, sites: Collection[str], folder: str = "") -> list[Line]:
    """Lines around `file:line`; empty when the file may not or cannot be read.

    Args:
        source: `file:line`, as the trace has it.
        sites: every site of the trace.
        folder: what a relative path is relative to: the working directory of the run.
    """
    file, _, number = source.rpartition(":")
    if source not in sites or not file or not number.isdecimal():
        return []
    text = _read(Path(folder, file) if folder else Path(file))
    lines = text.splitlines() if text else []
    at = int(number) if len(number) < 10 else 0
    if not 1 <= at <= len(lines):
        return []
    first = max(1, at - AROUND)
    last = min(len(lines), at + AROUND)
    return [Line(n, lines[n - 1].expandtabs(4), n == at) for n in range(first, last + 1)]


def _read(path: Path) -> str:
    try:
        # Non-blocking: a FIFO must not hang the report.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return ""
            blob = file.read(MAX_BYTES)
    except OSError:
        return ""
    first_line = blob[:200].split(b"\n", 1)[0]
    is_python = path.suffix in (".py", ".pyi") or (first_line.startswith(b"#!") and b"python" in first_line)
    return blob.decode("utf-8", "replace") if is_python and b"\0" not in blob else ""
