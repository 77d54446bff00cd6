"""What a process keeps for its verifier: flushes to be sent, some that were, and the names and contexts of all.

Bounded in bytes and in number. When there is no room the newest flush is dropped and counted; its names and contexts go
into the journal, so that what comes later can be decoded. Flushes that were sent stay as long as there is room: after
a cut the verifier says which ones it has, and the others are sent again. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from proctor.invariants.wire.frames import ORDER, Flush

RING_BYTES: Final = 32 << 20
RING_FLUSHES: Final = 8192
KEPT_BYTES: Final = 8 << 20  # of flushes that were sent: more than the two buffers of a socket hold
JOURNAL_BYTES: Final = 64 << 20
FIRST_CONTEXTS: Final = 32  # flushes whose contexts are said again: the first,
LAST_CONTEXTS: Final = 64  # and the last

_ENTRY_BYTES: Final = 256  # about what it takes besides its records
_NAMES, _CONTEXT = ORDER.index("names"), ORDER.index("context")


class Entry:
    """One flush, encoded."""

    __slots__ = ("body", "flush", "rows", "size")

    def __init__(self, flush: Flush, body: list[bytes]) -> None:
        self.flush, self.body = flush, body
        self.size = sum(flush.sizes) + _ENTRY_BYTES
        self.rows = sum(flush.rows)


class Ring:
    """Flushes on their way; see the head of this file."""

    def __init__(self, max_bytes: int = RING_BYTES, max_flushes: int = RING_FLUSHES) -> None:
        self.dropped_flushes = 0
        self.dropped_rows = 0
        self._max_bytes, self._max_flushes = max_bytes, max_flushes
        self._kept_bytes = min(KEPT_BYTES, max_bytes // 2)
        self._sent: deque[Entry] = deque()
        self._sent_bytes = 0
        self._unsent: deque[Entry] = deque()
        self._unsent_bytes = 0
        self._journal = _Journal()
        self._told = -1  # the last flush whose names and contexts the verifier has
        self._lock = threading.Lock()

    def put(self, entry: Entry) -> bool:
        """Add a flush; False when there was no room, and it was dropped."""
        with self._lock:
            self._journal.add(entry)
            if self._unsent_bytes + entry.size > self._max_bytes or len(self._unsent) >= self._max_flushes:
                self.dropped_flushes += 1
                self.dropped_rows += entry.rows
                return False
            self._unsent.append(entry)
            self._unsent_bytes += entry.size
            self._trim()
            return True

    def room(self) -> bool:
        """Whether a flush of usual size would find room."""
        return self._unsent_bytes < self._max_bytes // 2 and len(self._unsent) < self._max_flushes // 2

    def take(self) -> list[Entry]:
        """The next flush to be sent, after names and contexts that it may need; nothing when all is sent."""
        with self._lock:
            if not self._unsent:
                return []
            entry = self._unsent.popleft()
            self._unsent_bytes -= entry.size
            self._sent.append(entry)
            self._sent_bytes += entry.size
            self._trim()
            told, self._told = self._told, entry.flush.n
            return [*self._journal.between(told, entry.flush.n), entry]

    def rewind(self, have: int) -> None:
        """The verifier has the flushes up to this one: what came after is to be sent again, as far as it is kept."""
        with self._lock:
            while self._sent and self._sent[-1].flush.n > have:
                entry = self._sent.pop()
                self._sent_bytes -= entry.size
                self._unsent.appendleft(entry)
                self._unsent_bytes += entry.size
            while self._unsent and self._unsent[0].flush.n <= have:
                self._unsent_bytes -= self._unsent.popleft().size
            self._told = have

    @property
    def waiting(self) -> int:
        """Flushes that are not sent."""
        return len(self._unsent)

    @property
    def size(self) -> int:
        """Bytes held, without the journal."""
        return self._sent_bytes + self._unsent_bytes

    def _trim(self) -> None:
        while self._sent and (
            self._sent_bytes > self._kept_bytes
            or self._sent_bytes + self._unsent_bytes > self._max_bytes
            or len(self._sent) > self._max_flushes
        ):
            self._sent_bytes -= self._sent.popleft().size


class _Journal:
    """Names of all flushes and contexts of some, to be said again."""

    def __init__(self) -> None:
        self._names: list[_Part] = []
        self._names_bytes = 0
        self._first: list[_Part] = []
        self._last: deque[_Part] = deque(maxlen=LAST_CONTEXTS)

    def add(self, entry: Entry) -> None:
        rows, sizes = entry.flush.rows, entry.flush.sizes
        if rows[_NAMES] and self._names_bytes + sizes[_NAMES] <= JOURNAL_BYTES:
            self._names.append(_Part(entry, _NAMES))
            self._names_bytes += sizes[_NAMES] + _ENTRY_BYTES
        if rows[_CONTEXT]:
            (self._first if len(self._first) < FIRST_CONTEXTS else self._last).append(_Part(entry, _CONTEXT))

    def between(self, after: int, before: int) -> list[Entry]:
        """What was said in the flushes between two."""
        if after + 1 >= before:
            return []
        held = (*self._names, *self._first, *self._last)
        return [part.entry() for part in held if after < part.flush.n < before]


class _Part:
    """One table of a flush, to be said again; the bytes are shared."""

    __slots__ = ("data", "flush", "table")

    def __init__(self, entry: Entry, table: int) -> None:
        self.flush, self.table = entry.flush, table
        self.data = entry.body[table - entry.flush.sizes[:table].count(0)]

    def entry(self) -> Entry:
        flush, table = self.flush, self.table
        rows = tuple(n if i == table else 0 for i, n in enumerate(flush.rows))
        sizes = tuple(n if i == table else 0 for i, n in enumerate(flush.sizes))
        return Entry(Flush(flush.n, -1, flush.at, rows, sizes, again=True), [self.data])
