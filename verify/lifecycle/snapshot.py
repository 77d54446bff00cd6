"""What a verifier that is killed needs to carry on: one JSON file, replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import TraceError
from proctor.invariants.files import UNREADABLE, read_file, replace_file
from proctor.verify.lifecycle.record import TrackedIncident
from proctor.verify.notice import Notice

VERSION: Final = 1
MAX_BYTES: Final = 64 * 1024 * 1024


class Snapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of an incident book.

    Args:
        version: of this format.
        job: whose incidents they are.
        time, wall: the book's time line and epoch seconds at one moment, in seconds.
        number: incidents opened so far.
        finished: the job ended, and how it was left.
        incidents: the open ones and the latest of those that are over.
        begun: rules that began to fail, by step, of the last steps.
        lost: records lost so far, by reason.
        counters: what the counters of lost records said last.
        lost_at: when records were lost last, on the book's time line.
        unsent: notices that nobody has confirmed to have taken yet.
        processes: of the job's present life, by rank, the last of each.
    """

    version: int
    job: str
    time: float
    wall: float
    number: int = 0
    finished: bool | None = None
    incidents: list[TrackedIncident] = []
    begun: dict[int, list[str]] = {}
    lost: dict[str, int] = {}
    counters: dict[str, int] = {}
    lost_at: float = 0.0
    unsent: list[Notice] = []
    processes: dict[int, str] = {}


def write(path: Path, snapshot: Snapshot) -> None:
    """Replace the file. A reader sees the old or the new one, whenever the writer is killed.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    replace_file(path, msgspec.json.encode(snapshot), mode=0o600)


def read(path: Path) -> Snapshot | None:
    """What was written last; `None` when nothing was.

    Raises:
        TraceError: it cannot be read, is none of ours, or of a later Proctor.
    """
    hint = "move it away to begin anew; open incidents are then told again"
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version > VERSION:
            raise TraceError(f"{path} has version {version}; this Proctor knows {VERSION}", hint=hint)
        return msgspec.json.decode(data, type=Snapshot)
    except UNREADABLE as error:
        raise TraceError(f"{path} is not a list of incidents: {error}", hint=hint) from None


class _Version(msgspec.Struct):
    version: int
