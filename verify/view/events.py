"""`RUN/verify/events.jsonl`: what happened while a run was watched, one JSON object a line, for the live view.

`{"id": 17, "time": 1763700000.0, "kind": "incident", "data": {…}}`. Ids rise by one and are never used again, so a reader
that has seen an id wants exactly those after it. One process writes; any number read. A line that was cut (killed
writer, full disk) is left out by readers and closed off by the next writer. At `max_bytes` the file becomes
`events.1.jsonl`, and the new one begins with the latest state of every incident, so that the newest file suffices.
Nothing is synced to disk: losing the last second of a view costs nobody a page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

MAX_BYTES: Final = 16 * 1024 * 1024
MAX_LINE: Final = 256 * 1024
MAX_TEXT: Final = 4000  # characters of one text of an event
MAX_KEPT: Final = 5000  # incidents whose state a new file begins with
_READ: Final = 4 * 1024 * 1024  # bytes at a time
_NAME: Final = "events.jsonl"


class IncidentEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one incident, whole each time: the last one of a key is what holds.

    state: suspected, firing or resolved.
    began, ended: epoch seconds; `ended` of a resolved one.
    ranks: which it is about, in words: `3 of 64: 17, 18, 40`.
    details: label → text, in reading order.
    capsule: folder below the run, "" without one.
    """

    key: str
    title: str
    state: str
    severity: str = "error"
    tier: str = "ticket"
    code: str = ""
    first_step: int | None = None
    began: float = 0.0
    ended: float = 0.0
    ranks: str = ""
    axis: str = ""
    rules: int = 1
    flaps: int = 0
    details: dict[str, str] = {}
    capsule: str = ""


class StepEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the run and its verifier are.

    step: last one that was judged.
    ahead: last one that any rank has reached.
    behind: the rank that is furthest behind and its step, when it lags.
    rate: steps a second.
    latency_ms: from the end of the step to its verdict.
    overhead: share of the time of training that being watched costs, where it has a budget.
    delay: steps that may go by between two looks because of it.
    """

    step: int
    ahead: int = -1
    ranks: int = 1
    behind: int | None = None
    behind_step: int | None = None
    checked: int = 0
    violated: int = 0
    rate: float = 0.0
    latency_ms: float = 0.0
    overhead: float = 0.0
    delay: int = 0
    finished: bool = False


class CoverageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the verifier cannot see at present; an empty one says that it sees everything again.

    lost: reason → records.
    """

    lost: dict[str, int] = {}
    silent: list[int] = []
    notes: list[str] = []


class NoticeEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A notice went out, was held back or failed."""

    action: str
    key: str
    title: str = ""
    sink: str = ""
    outcome: str = "queued"  # queued, sent, suppressed, failed
    reason: str = ""


Data = IncidentEvent | StepEvent | CoverageEvent | NoticeEvent
KINDS: Final[dict[str, type[Data]]] = {
    "incident": IncidentEvent,
    "step": StepEvent,
    "coverage": CoverageEvent,
    "notice": NoticeEvent,
}
_KIND_OF: Final = {kind: name for name, kind in KINDS.items()}


class Event(msgspec.Struct, frozen=True):
    """One line."""

    id: int
    time: float
    kind: str
    data: Data


class _Line(msgspec.Struct):
    id: int
    time: float
    kind: str
    data: msgspec.Raw


_LINE: Final = msgspec.json.Decoder(_Line)
_DATA: Final = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def decode(line: bytes) -> Event | None:
    """One line; `None` for one that is cut, too long, or of a kind that we do not know."""
    if len(line) > MAX_LINE:
        return None
    try:
        head = _LINE.decode(line)
        decoder = _DATA.get(head.kind)
        if decoder is None or not 0 < head.id < 1 << 62:
            return None
        return Event(head.id, head.time, head.kind, decoder.decode(head.data))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def encode(event: Event) -> bytes:
    """One line with its end."""
    return msgspec.json.encode(event) + b"\n"


class EventLog:
    """Appends events. One process writes; it never raises for a disk that is full or gone, and counts what it lost.

    Args:
        run: the run directory; the file is `verify/events.jsonl` below it.
        max_bytes: of one file.
        now: epoch seconds.
    """

    def __init__(self, run: Path, *, max_bytes: int = MAX_BYTES, now: Callable[[], float] = time.time) -> None:
        self.path = run / "verify" / _NAME
        self.lost = 0
        self._max_bytes, self._now = max_bytes, now
        self._latest: dict[str, IncidentEvent] = {}
        self._descriptor = -1
        self._size = 0
        self._torn = False
        self._last = self._recover()

    def append(self, data: Data) -> int:
        """Write one event; returns its id."""
        data = _bounded(data)
        if isinstance(data, IncidentEvent):
            self._latest.pop(data.key, None)
            self._latest[data.key] = data
            while len(self._latest) > MAX_KEPT:
                over = next((k for k, i in self._latest.items() if i.state == "resolved"), next(iter(self._latest)))
                del self._latest[over]
        if self._size > self._max_bytes:
            self._rotate()
        return self._write(data)

    def close(self) -> None:
        """Let go of the file; a later `append` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: Data) -> int:
        self._last += 1
        line = encode(Event(self._last, self._now(), _KIND_OF[type(data)], data))
        if len(line) > MAX_LINE:
            self.lost += 1
            return self._last
        try:
            if self._descriptor < 0:
                self._open()
            blob = b"\n" + line if self._torn else line
            written = os.write(self._descriptor, blob)
            self._size += written
            self._torn = written < len(blob)
            self.lost += self._torn
        except OSError:
            self.lost += 1
            self.close()
        return self._last

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size
        if self._size:
            with open(self.path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                self._torn = file.read(1) != b"\n"

    def _recover(self) -> int:
        """The last id of an earlier writer, and the incidents that it knew."""
        last = 0
        for path in (_previous(self.path), self.path):
            tail = Tail(path)
            while events := tail.read():
                last = max(last, events[-1].id)
                for event in events:
                    if isinstance(event.data, IncidentEvent):
                        self._latest[event.data.key] = event.data
            tail.close()
        for key in list(self._latest)[:-MAX_KEPT]:
            del self._latest[key]
        return last

    def _rotate(self) -> None:
        self.close()
        try:
            self.path.replace(_previous(self.path))
        except OSError:
            self.lost += 1
            return
        self._size, self._torn = 0, False
        for incident in list(self._latest.values()):
            self._write(incident)


class Tail:
    """Reads a log as it grows, also over a rotation.

    Args:
        path: of the log; it may not exist yet.
        after: the id after which events are wanted.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        self.path, self.last = path, after
        self._file: Any = None  # Any: a binary file or None
        self._rest = b""
        self._skipping = False  # inside a line that is too long

    def read(self) -> list[Event]:
        """Events that have come since; at most some megabytes of them, so read until there are none."""
        reopened = False
        while self._file is not None or self._open():
            blob = self._chunk()
            if blob:
                if events := self._events(blob):
                    return events
            elif reopened or not self._replaced():
                return []
            else:
                self.close()
                reopened = True
        return []

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest, self._skipping = None, b"", False

    def _open(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115  kept open over a rotation
        return True

    def _chunk(self) -> bytes:
        try:
            return self._file.read(_READ) or b""
        except OSError:
            return b""

    def _replaced(self) -> bool:
        """Whether the path now names another file, or this one was cut off."""
        mine = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (mine.st_ino, mine.st_dev) != (there.st_ino, there.st_dev) or mine.st_size < self._file.tell()

    def _events(self, blob: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + blob).split(b"\n")
        found = []
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            event = decode(line) if line else None
            if event is not None and event.id > self.last:
                self.last = event.id
                found.append(event)
        if len(self._rest) > MAX_LINE:
            self._rest, self._skipping = b"", True
        return found


def log_path(run: Path) -> Path:
    """Where the log of a run is."""
    return run / "verify" / _NAME


def _previous(path: Path) -> Path:
    return path.with_name("events.1.jsonl")


def _bounded(data: Data) -> Data:
    """The same event with texts of a bounded length."""
    changes: dict[str, Any] = {}  # Any: fields of several kinds
    for name in data.__struct_fields__:
        value = getattr(data, name)
        if isinstance(value, str) and len(value) > MAX_TEXT:
            changes[name] = value[: MAX_TEXT - 1] + "…"
        elif isinstance(value, dict):
            cut = {k[:200]: v[:MAX_TEXT] if isinstance(v, str) else v for k, v in list(value.items())[:32]}
            changes |= {} if cut == value else {name: cut}
        elif isinstance(value, list) and len(value) > 256:
            changes[name] = value[:256]
    return msgspec.structs.replace(data, **changes) if changes else data
