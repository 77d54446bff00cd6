"""What the verifier's core hears of the processes of a job, in order, through a queue of bounded size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

INBOX_BYTES: Final = 256 << 20
INBOX_EVENTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Joined:
    """A process said hello.

    process: its name, `<rank>-<pid>`; with `~2` for the second life of a name.
    folder: its folder under `RUN/procs`.
    info: its `process.json`, as far as it holds for a verifier (`dropped` without what is missing in files only).
    resumed: it was here before.
    """

    process: str
    folder: str
    host: str
    info: Mapping[str, Any]
    resumed: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Records, with the process's own codes.

    reached: the step that the process was in when it let go of them; None: names and contexts of records that got lost.
    """

    process: str
    records: Mapping[str, pa.RecordBatch]
    reached: int | None


@dataclass(frozen=True, slots=True)
class Told:
    """The `process.json` of a process changed."""

    process: str
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Glanced:
    """Fingerprints of pieces of parameters: step, name of the piece, fingerprint."""

    process: str
    rows: Sequence[tuple[int, str, int]]


@dataclass(frozen=True, slots=True)
class Gap:
    """Flushes that did not arrive; `fill.fill` finds their records where the run's files can be read.

    first, last: numbers of the flushes.
    spans: of each table, the numbers of the rows (begin, end) that are missing.
    """

    process: str
    folder: str
    first: int
    last: int
    spans: Mapping[str, tuple[int, int]]

    @property
    def rows(self) -> int:
        return sum(end - begin for begin, end in self.spans.values())


@dataclass(frozen=True, slots=True)
class Left:
    """A process is gone.

    how: `bye` it ended, `eof` its connection broke, `timeout` nothing was heard of it, `replaced` by another of its name.
    """

    process: str
    how: str


Event = Joined | Rows | Told | Glanced | Gap | Left


class Inbox:
    """A queue from the server's thread to the core's. The server stops reading while it is `full`, so `put` never waits.

    Args:
        on_room: called, from the core's thread, when the queue is no longer full.
    """

    def __init__(self, max_bytes: int = INBOX_BYTES, max_events: int = INBOX_EVENTS) -> None:
        self.on_room: Callable[[], None] | None = None
        self._events: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._max_bytes, self._max_events = max_bytes, max_events
        self._ready = threading.Condition()

    @property
    def full(self) -> bool:
        return self._bytes >= self._max_bytes or len(self._events) >= self._max_events

    @property
    def size(self) -> int:
        """Bytes of records that wait."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event, size: int = 64) -> None:
        with self._ready:
            self._events.append((event, size))
            self._bytes += size
            self._ready.notify()

    def get(self, timeout_s: float | None = None, most: int = 1024) -> list[Event]:
        """The next events, up to `most`; waits for one, and gives none when the time is over."""
        with self._ready:
            if not self._events:
                self._ready.wait(timeout_s)
            was_full = self.full
            taken: list[Event] = []
            while self._events and len(taken) < most:
                event, size = self._events.popleft()
                self._bytes -= size
                taken.append(event)
            room = was_full and not self.full
        if room and self.on_room is not None:
            self.on_room()
        return taken
