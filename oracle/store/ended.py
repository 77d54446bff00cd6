"""How a command ended that a signal ended: which rank, by which signal, and where each rank was last seen; in one line.

A rank that is killed (a crash in native code, the out-of-memory killer) leaves no traceback and writes nothing any more. So each rank
keeps a page of a mapped file up to date, which outlives it.
"""

from __future__ import annotations

import mmap
import re
import signal
from pathlib import Path
from typing import Final

from proctor.invariants.files import read_file

SIZE: Final = 512  # bytes of the page
NAME: Final = "where"
_MEANS: Final = {"SIGSEGV": "a crash in native code", "SIGBUS": "a crash in native code", "SIGABRT": "native code gave up", "SIGKILL": "memory ran out, or somebody ended it"}
_ROOT: Final = re.compile(r"rank\s*:\s*(\d+)[^\n]*\n[^\n]*exitcode\s*:\s*-(\d+)")  # torchrun's table of failures
_SPAWNED: Final = re.compile(r"process (\d+) terminated with signal (SIG\w+)")  # torch.multiprocessing
_SHOWN: Final = 4
_MOST: Final = 1 << 20  # bytes of a log


class Whereabouts:
    """The page of one rank.

    Args:
        folder: of the rank.
    """

    def __init__(self, folder: Path) -> None:
        with open(folder / NAME, "wb+") as file:
            file.write(bytes(SIZE))
            file.flush()
            self._page = mmap.mmap(file.fileno(), SIZE)

    def at(self, step: int, module: str) -> None:
        """A module is called."""
        text = f"{step} {module}".encode(errors="replace")[: SIZE - 1]
        self._page[: len(text) + 1] = text + b"\0"

    def close(self) -> None:
        """The rank has recorded what it was to."""
        self._page.close()


def ended(code: int | None, log: Path, folder: Path) -> str:
    """`rank 1 was ended by SIGSEGV (a crash in native code); last seen: rank 0 in layers.1, rank 1 in layers.0 (step 0)`; "" where no signal ended it.

    Args:
        code: of the command.
        log: what it said.
        folder: of the run.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _MOST))
            said = file.read().decode(errors="replace")
    except OSError:
        said = ""
    _, _, root = said.rpartition("Root Cause")
    table, spawned = _ROOT.search(root), _SPAWNED.search(said)
    if table is not None:
        who, name = f"rank {table[1]}", _name(int(table[2]))
    elif spawned is not None:
        who, name = f"rank {spawned[1]}", spawned[2]
    elif code is not None and (code < 0 or code > 128):
        who, name = "it", _name(-code if code < 0 else code - 128)
    else:
        return ""
    if not name:
        return ""
    means = f" ({_MEANS[name]})" if name in _MEANS else ""
    seen = _seen(folder)
    return f"{who} was ended by {name}{means}{f'; last seen: {seen}' if seen else ''}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _seen(folder: Path) -> str:
    """Where ranks were, as far as they say."""
    found: dict[int, tuple[str, str]] = {}
    for path in folder.glob(f"rank*/{NAME}"):
        number = path.parent.name.removeprefix("rank")
        try:
            text = read_file(path, SIZE).partition(b"\0")[0].decode(errors="replace")
        except OSError:
            continue
        step, _, module = text.partition(" ")
        if number.isdigit() and step.isdigit():
            found[int(number)] = step, module or "the model"
    rows = [f"rank {rank} in {module[:120]} of step {step}" for rank, (step, module) in sorted(found.items())]
    return ", ".join(rows[:_SHOWN]) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")
