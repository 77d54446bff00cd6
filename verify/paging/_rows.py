"""Rows of the outbox as values: what waits, what a receiver believes, and when two notices say the same."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final

import msgspec

from proctor.invariants.invariant import Tier
from proctor.verify.notice import Notice

PAGE_RANK: Final = 10  # of a page that is no more than info
WAITING: Final = "state IN ('pending', 'failed')"


class Told(msgspec.Struct, frozen=True):
    """What a receiver believes of one incident.

    Args:
        state: open, unsure (it may have taken the trigger), closed.
        opened: the notice with which it began.
        last: the latest trigger.
        content: of the latest.
        rank: of the latest: its tier and severity.
        sent_at: epoch seconds of the latest.
    """

    state: str
    opened: Notice
    last: Notice
    content: str
    rank: int
    sent_at: float

    @property
    def is_open(self) -> bool:
        return self.state == "open"


class Waiting(msgspec.Struct, frozen=True):
    """A message that is not sent yet; `unsure` has the bits of `Outbox.begin`."""

    id: int
    attempts: int
    unsure: int
    content: str
    notice: bytes


def told(db: sqlite3.Connection, sink: str, key: str) -> Told | None:
    """What a receiver believes of an incident, None when it never heard of it."""
    query = "SELECT state, opened, last, content, rank, sent_at FROM incident WHERE sink=? AND key=?"
    row = db.execute(query, (sink, key)).fetchone()
    if row is None:
        return None
    opened, last = decode(row[1]), decode(row[2])
    return None if opened is None or last is None else Told(row[0], opened, last, row[3], row[4], row[5])


def waiting(db: sqlite3.Connection, sink: str, key: str) -> dict[str, Waiting]:
    """What waits for a receiver about an incident, by action."""
    query = f"SELECT action, id, attempts, unsure, content, notice FROM message WHERE sink=? AND key=? AND {WAITING}"
    return {row[0]: Waiting(*row[1:]) for row in db.execute(query, (sink, key))}


def believe(db: sqlite3.Connection, sink: str, key: str, now: Told, next_at: float | None, until: float | None) -> None:
    """Write down what a receiver believes now, and when it is told again."""
    row = (sink, key, now.state, encode(now.opened), encode(now.last), now.content, now.rank, now.sent_at, next_at, until)
    db.execute("INSERT OR REPLACE INTO incident VALUES (?,?,?,?,?,?,?,?,?,?)", row)


def count(db: sqlite3.Connection, sink: str, name: str) -> None:
    """One more of something at a receiver."""
    query = "INSERT INTO counter VALUES (?,?,1) ON CONFLICT (sink, name) DO UPDATE SET value=value+1"
    db.execute(query, (sink, name))


def rank(notice: Notice) -> int:
    """What is sent first: pages, then the more severe."""
    return notice.severity.level + (PAGE_RANK if notice.tier is Tier.PAGE else 0)


def content(notice: Notice) -> str:
    """Equal for notices that say the same, whenever they say it."""
    return hashlib.sha256(encode(msgspec.structs.replace(notice, at=0.0, began=0.0))).hexdigest()[:32]


def encode(notice: Notice) -> bytes:
    """As it is stored."""
    return msgspec.json.encode(notice)


def decode(blob: bytes) -> Notice | None:
    """What was stored; None when somebody else wrote it."""
    try:
        return msgspec.json.decode(blob, type=Notice)
    except (msgspec.MsgspecError, TypeError):
        return None
