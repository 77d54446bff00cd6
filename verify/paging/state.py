"""What waits, what was sent and what was not: for `page status`, metrics and the live view."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from proctor.verify.paging import _rows
from proctor.verify.paging._rows import WAITING
from proctor.verify.paging.ledger import Mute
from proctor.verify.paging.store import Store

_LISTED: Final = 50


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one sink: messages that wait now, and since the outbox was made."""

    waiting: int = 0
    retrying: int = 0
    open: int = 0
    held: int = 0
    sent: int = 0
    failed: int = 0
    dead: int = 0
    suppressed: int = 0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One message that waits or was rejected."""

    sink: str
    key: str
    action: str
    state: str
    title: str
    attempts: int
    merged: int
    age_s: float
    due_in_s: float
    error: str


class Untold(msgspec.Struct, frozen=True, kw_only=True):
    """One incident that a sink was not told of."""

    sink: str
    key: str
    title: str
    reason: str
    count: int
    last: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Args:
        sinks: counts by sink; `-` is what no sink takes.
        lines: messages that wait or were rejected, newest first, at most fifty.
        untold: what was suppressed, newest first, at most fifty.
        mutes: those that run.
        troubles: what keeps a sink from sending, as far as this process knows.
        durable: False while the disk is full and all is in memory only.
    """

    sinks: dict[str, Counts] = msgspec.field(default_factory=dict)
    lines: tuple[Line, ...] = ()
    untold: tuple[Untold, ...] = ()
    mutes: tuple[Mute, ...] = ()
    troubles: dict[str, str] = msgspec.field(default_factory=dict)
    durable: bool = True

    @property
    def outcomes(self) -> dict[str, int]:
        """Notices by what became of them, as metrics count them."""
        counts = list(self.sinks.values())
        return {
            "sent": sum(c.sent for c in counts),
            "failed": sum(c.dead for c in counts),
            "suppressed": sum(c.suppressed for c in counts),
        }

    @property
    def waiting(self) -> int:
        """Messages that are not sent yet."""
        return sum(c.waiting + c.retrying for c in self.sinks.values())


def status(store: Store, now: float, names: list[str], troubles: dict[str, str] | None = None) -> Status:
    """Read the outbox.

    Args:
        store: the file.
        now: epoch seconds.
        names: of the sinks that are to be there although nothing happened to them.
        troubles: what senders of this process complain of.
    """

    def body(db: sqlite3.Connection) -> Status:
        counts: dict[str, dict[str, int]] = {name: {} for name in names}

        def add(query: str) -> None:
            for sink, name, value in db.execute(query):
                counts.setdefault(sink, {})[name] = value

        add("SELECT sink, 'waiting', COUNT(*) FROM message WHERE state='pending' GROUP BY sink")
        add("SELECT sink, 'retrying', COUNT(*) FROM message WHERE state='failed' GROUP BY sink")
        add("SELECT sink, 'open', COUNT(*) FROM incident WHERE state='open' GROUP BY sink")
        add("SELECT sink, 'held', COUNT(*) FROM held GROUP BY sink")
        add("SELECT sink, name, value FROM counter WHERE name IN ('sent', 'failed', 'dead', 'suppressed')")
        listed = db.execute(
            f"SELECT sink, key, action, state, notice, attempts, merged, created, next_at, error FROM message"
            f" WHERE {WAITING} OR state='dead' ORDER BY state='dead', id DESC LIMIT ?",
            (_LISTED,),
        ).fetchall()
        untold = db.execute(
            "SELECT sink, key, title, reason, count, last FROM suppressed ORDER BY last DESC LIMIT ?", (_LISTED,)
        ).fetchall()
        query = "SELECT id, sink, key, code, until, reason, by_whom, created FROM mute WHERE until>? ORDER BY id"
        return Status(
            sinks={name: Counts(**found) for name, found in sorted(counts.items())},
            lines=tuple(_line(row, now) for row in listed),
            untold=tuple(Untold(sink=r[0], key=r[1], title=r[2], reason=r[3], count=r[4], last=r[5]) for r in untold),
            mutes=tuple(Mute(*row) for row in db.execute(query, (now,))),
            troubles=troubles or {},
            durable=store.durable,
        )

    return store.run(body)


def _line(row: tuple[str, str, str, str, bytes, int, int, float, float, str], now: float) -> Line:
    sink, key, action, state, blob, attempts, merged, created, next_at, error = row
    notice = _rows.decode(blob)
    return Line(
        sink=sink,
        key=key,
        action=action,
        state=state,
        title="(unreadable)" if notice is None else notice.title,
        attempts=attempts,
        merged=merged,
        age_s=max(now - created, 0.0),
        due_in_s=max(next_at - now, 0.0),
        error=error,
    )
