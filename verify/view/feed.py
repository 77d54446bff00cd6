"""Events of a run for many readers at once: each gets every event once, in order, also over a lost connection.

One poller reads the log; each reader has a bounded queue. A reader that does not keep up is let go: its browser comes
back with the last id that it has seen and gets what followed, or, where that is no longer held, the whole state anew.
Steps are the state of a moment: of several that come at once only the last is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.verify.view.events import (
    CoverageEvent,
    Event,
    IncidentEvent,
    NoticeEvent,
    StepEvent,
    Tail,
    log_path,
)
from proctor.verify.wording import clean

MAX_READERS: Final = 64
MAX_QUEUE: Final = 256  # events that a reader may be behind
HELD: Final = 5000  # events that a reader can come back to
MAX_INCIDENTS: Final = 5000
NOTICES: Final = 50  # last ones that a new reader gets
POLL_S: Final = 0.25


class Reader:
    """One connection: text of server-sent events, and whether it was let go."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue(MAX_QUEUE + HELD + MAX_INCIDENTS)
        self.waiting = 0

    def offer(self, text: str) -> bool:
        """Whether there was room."""
        if self.queue.qsize() > self.waiting + MAX_QUEUE:
            return False
        self.queue.put_nowait(text)
        return True


class Feed:
    """What the log of a run says, for readers.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._tail = Tail(log_path(run))
        self._held: deque[Event] = deque(maxlen=HELD)
        self._incidents: dict[str, Event] = {}
        self._notices: deque[Event] = deque(maxlen=NOTICES)
        self._step: Event | None = None
        self._coverage: Event | None = None
        self._forgotten = 0  # the highest id that is no longer held
        self._readers: set[Reader] = set()
        self.let_go = 0

    @property
    def readers(self) -> int:
        return len(self._readers)

    def join(self, after: int | None) -> Reader | None:
        """A reader who has seen the events up to an id, or none; `None` when there are too many readers."""
        if len(self._readers) >= MAX_READERS:
            return None
        reader = Reader()
        if after is None or after < self._forgotten or after > self._tail.last:
            reader.queue.put_nowait("event: reset\ndata: {}\n\n")
            events = self._state()
        else:
            events = [e for e in self._held if e.id > after]
            if self._step is not None and self._step.id > after:
                events.append(self._step)
        for event in sorted(events, key=lambda e: e.id):
            reader.queue.put_nowait(message(event))
        reader.waiting = reader.queue.qsize()
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        self._readers.discard(reader)

    def poll(self) -> int:
        """Read what is new and pass it on; returns how many events that were."""
        count = 0
        while events := self._tail.read():
            count += len(events)
            steps = [e for e in events if isinstance(e.data, StepEvent)]
            for event in events:
                if isinstance(event.data, StepEvent):
                    if event is not steps[-1]:
                        continue
                    self._step = event
                else:
                    self._hold(event)
                self.publish(message(event))
        return count

    def publish(self, text: str) -> None:
        """Give one message to every reader; those without room are let go."""
        for reader in list(self._readers):
            if not reader.offer(text):
                self.let_go += 1
                self._readers.discard(reader)
                with contextlib.suppress(asyncio.QueueEmpty):
                    while True:
                        reader.queue.get_nowait()
                reader.queue.put_nowait(None)

    def close(self) -> None:
        """End all connections."""
        for reader in list(self._readers):
            self._readers.discard(reader)
            with contextlib.suppress(asyncio.QueueFull):
                reader.queue.put_nowait(None)
        self._tail.close()

    def _hold(self, event: Event) -> None:
        if len(self._held) == HELD:
            self._forgotten = self._held[0].id
        self._held.append(event)
        if isinstance(event.data, IncidentEvent):
            self._incidents.pop(event.data.key, None)
            self._incidents[event.data.key] = event
            if len(self._incidents) > MAX_INCIDENTS:
                del self._incidents[next(iter(self._incidents))]
        elif isinstance(event.data, NoticeEvent):
            self._notices.append(event)
        elif isinstance(event.data, CoverageEvent):
            self._coverage = event

    def _state(self) -> list[Event]:
        single = [e for e in (self._step, self._coverage) if e is not None]
        return [*self._incidents.values(), *self._notices, *single]


def message(event: Event) -> str:
    """A server-sent event: its id, kind, and cleaned data on one line."""
    data = {"time": event.time, **_cleaned(msgspec.to_builtins(event.data))}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {msgspec.json.encode(data).decode()}\n\n"


def _cleaned(value: Any) -> Any:  # Any: JSON
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(k): _cleaned(v) for k, v in value.items()}
    return [_cleaned(v) for v in value] if isinstance(value, list) else value
