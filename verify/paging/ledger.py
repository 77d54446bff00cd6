"""What the gate remembers over restarts: mutes, what is held back, budgets that are spent, digests, and what was not sent."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Final

import msgspec

from proctor.errors import UsageError
from proctor.invariants.invariant import Tier
from proctor.verify.notice import Notice
from proctor.verify.paging import _rows
from proctor.verify.paging.store import Store
from proctor.verify.wording import clean

HOUR_S: Final = 3600.0
_KEPT: Final = 1_000  # rows of what was not sent
_MOST_HELD: Final = 5_000
_MOST_MEMBERS: Final = 100_000  # of digests, …
_MOST_TOLD: Final = 2_000  # … of which more than the key is kept
_MOST_MUTES: Final = 200


class Mute(msgspec.Struct, frozen=True):
    """Nobody is told of matching incidents until a moment; empty fields match everything.

    Args:
        id: for `page unmute`.
        sink: name of one.
        key: dedup key of one incident.
        code: of one rule.
        until: epoch seconds.
        reason: why; somebody will ask.
        by: who.
        created: epoch seconds.
    """

    id: int
    sink: str
    key: str
    code: str
    until: float
    reason: str
    by: str
    created: float

    def matches(self, sink: str, notice: Notice) -> bool:
        """Whether it silences a notice at a sink."""
        pairs = ((self.sink, sink), (self.key, notice.key), (self.code, notice.code))
        return all(wanted in ("", found) for wanted, found in pairs)

    def say(self) -> str:
        """`muted by ada: known since Monday`."""
        return "muted" + (f" by {self.by}" if self.by else "") + f": {self.reason}"


class Ledger:
    """Tables of a `Store`.

    Args:
        store: the file.
        now: epoch seconds.
    """

    def __init__(self, store: Store, now: Callable[[], float] = time.time) -> None:
        self._store, self._now = store, now

    def mute(self, *, until: float, reason: str, by: str = "", sink: str = "", key: str = "", code: str = "") -> int:
        """Begin a mute; returns its id. Raises `UsageError` when there are too many."""
        row = (clean(sink, 60), clean(key, 300), clean(code, 40), until, clean(reason, 300), clean(by, 80), self._now())

        def body(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM mute WHERE until<=?", (self._now(),))
            if db.execute("SELECT COUNT(*) FROM mute").fetchone()[0] >= _MOST_MUTES:
                raise UsageError(f"{_MOST_MUTES} mutes are running", hint="proctor page unmute --all")
            query = "INSERT INTO mute (sink, key, code, until, reason, by_whom, created) VALUES (?,?,?,?,?,?,?)"
            return db.execute(query, row).lastrowid or 0

        return self._store.run(body)

    def unmute(self, number: int | None = None) -> int:
        """End one mute, or all; returns how many ended."""
        query, args = ("DELETE FROM mute", ()) if number is None else ("DELETE FROM mute WHERE id=?", (number,))
        return self._store.run(lambda db: db.execute(query, args).rowcount)

    def mutes(self) -> list[Mute]:
        """Those that run."""
        query = "SELECT id, sink, key, code, until, reason, by_whom, created FROM mute WHERE until>? ORDER BY id"
        return [Mute(*row) for row in self._store.run(lambda db: db.execute(query, (self._now(),)).fetchall())]

    def hold(self, sink: str, notice: Notice, reason: str) -> None:
        """Keep a notice until a mute or maintenance is over."""

        def body(db: sqlite3.Connection) -> None:
            full = db.execute("SELECT COUNT(*) FROM held").fetchone()[0] >= _MOST_HELD
            known = db.execute("SELECT 1 FROM held WHERE sink=? AND key=?", (sink, notice.key)).fetchone()
            if known or not full:
                row = (sink, notice.key, _rows.encode(notice), reason)
                db.execute("INSERT OR REPLACE INTO held VALUES (?,?,?,?)", row)
            if not known:
                self.suppress(sink, notice, reason)

        self._store.run(body)

    def held(self) -> list[tuple[str, Notice]]:
        """What is kept back: sink and notice."""
        rows = self._store.run(lambda db: db.execute("SELECT sink, notice FROM held").fetchall())
        decoded = ((sink, _rows.decode(blob)) for sink, blob in rows)
        return [(sink, notice) for sink, notice in decoded if notice is not None]

    def drop_held(self, key: str, sink: str = "") -> None:
        """It is over, or it may go."""
        query, args = "DELETE FROM held WHERE key=?", (key,)
        if sink:
            query, args = query + " AND sink=?", (key, sink)  # type: ignore[assignment]
        self._store.run(lambda db: db.execute(query, args))

    def suppress(self, sink: str, notice: Notice, reason: str) -> None:
        """Write down that nobody was told, and why."""
        now = self._now()

        def body(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO suppressed VALUES (?,?,?,?,1,?,?) ON CONFLICT (sink, key, reason)"
                " DO UPDATE SET count=count+1, last=excluded.last",
                (sink, notice.key, reason[:300], notice.title[:200], now, now),
            )
            _rows.count(db, sink, "suppressed")

        self._store.run(body)

    def within_budget(self, tier: Tier, most: int) -> bool:
        """Spend one of `most` incidents an hour, if one is left."""
        now = self._now()

        def body(db: sqlite3.Connection) -> bool:
            db.execute("DELETE FROM spent WHERE at<=? OR at>?", (now - HOUR_S, now + 60))
            if db.execute("SELECT COUNT(*) FROM spent WHERE tier=?", (tier.value,)).fetchone()[0] >= most:
                return False
            db.execute("INSERT INTO spent VALUES (?,?)", (now, tier.value))
            return True

        return self._store.run(body)

    def digested(self, key: str) -> bool:
        """Whether an incident is told in a digest."""
        query = "SELECT 1 FROM digest WHERE key=?"
        return self._store.run(lambda db: db.execute(query, (key,)).fetchone() is not None)

    def add_digested(self, notice: Notice) -> None:
        """Tell an incident in the digest of its tier."""

        def body(db: sqlite3.Connection) -> None:
            there = db.execute("SELECT COUNT(*) FROM digest").fetchone()[0]
            if there < _MOST_MEMBERS:
                row = (notice.key, notice.tier.value, _rows.encode(notice) if there < _MOST_TOLD else b"")
                db.execute("INSERT OR REPLACE INTO digest VALUES (?,?,?)", row)

        self._store.run(body)

    def drop_digested(self, key: str) -> Tier | None:
        """It is over; returns the tier whose digest it leaves empty."""

        def body(db: sqlite3.Connection) -> Tier | None:
            row = db.execute("SELECT tier FROM digest WHERE key=?", (key,)).fetchone()
            if row is None:
                return None
            db.execute("DELETE FROM digest WHERE key=?", (key,))
            left = db.execute("SELECT 1 FROM digest WHERE tier=? LIMIT 1", row).fetchone()
            return None if left else Tier(row[0])

        return self._store.run(body)

    def digest(self, tier: Tier) -> list[Notice]:
        """The incidents of a digest, as far as more than their keys is kept."""
        query = "SELECT notice FROM digest WHERE tier=? AND notice<>x''"
        rows = self._store.run(lambda db: db.execute(query, (tier.value,)).fetchall())
        return [n for n in (_rows.decode(row[0]) for row in rows) if n is not None]

    def members(self, tier: Tier) -> int:
        """How many incidents a digest has."""
        query = "SELECT COUNT(*) FROM digest WHERE tier=?"
        return int(self._store.run(lambda db: db.execute(query, (tier.value,)).fetchone()[0]))

    def prune(self) -> None:
        """Forget mutes that ended and what was not sent long ago."""

        def body(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM mute WHERE until<=?", (self._now(),))
            db.execute(
                "DELETE FROM suppressed WHERE last <= (SELECT last FROM suppressed ORDER BY last DESC LIMIT 1 OFFSET ?)",
                (_KEPT,),
            )

        self._store.run(body)
