"""The durable queue: what is to be sent to whom, in which order, and what each receiver already believes.

At most one message waits per receiver, incident and action: later notices are merged into it, so that a receiver that
is down for a day costs a few rows. A trigger goes before its resolve; a resolve whose trigger never left cancels both.
An attempt is written down before it is made and marked right after it succeeded. A crash between the receiver's
answer and the mark makes one more attempt, with the same dedup key and event id, which is the only duplicate there is.
"""

from __future__ import annotations

import random
import sqlite3
import time
import uuid
from collections.abc import Callable
from typing import Final

import msgspec

from proctor.invariants.invariant import Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.paging import _rows, admission
from proctor.verify.paging._rows import WAITING, Told
from proctor.verify.paging.store import Store
from proctor.verify.sinks import Delivery, Sink

BASE_S: Final = 1.0  # first retry
CAP_S: Final = 300.0  # longest time between two retries, but for what a receiver asks
ASKED_CAP_S: Final = 3600.0
MOST_AGE_S: Final = 3 * 86400.0  # then a message is given up
KEPT: Final = 2_000  # messages that are done, incidents that are over


class Message(msgspec.Struct, frozen=True):
    """One message that is due."""

    id: int
    version: int
    attempts: int
    delivery: Delivery


class Outbox:
    """Messages and incidents in a `Store`.

    Args:
        store: the file.
        now: epoch seconds.
        jitter: from 0 to 1; spreads retries.
    """

    def __init__(
        self, store: Store, now: Callable[[], float] = time.time, jitter: Callable[[], float] = random.random
    ) -> None:
        self._store, self._now, self._jitter = store, now, jitter

    def put(self, sink: Sink, notice: Notice, *, delay_s: float = 0.0, repeat: bool = False) -> str:
        """Queue a notice for a receiver.

        Args:
            sink: the receiver.
            notice: tidied by the caller.
            delay_s: not before so many seconds, for a new message.
            repeat: send an update also to a receiver that cannot merge it.

        Returns:
            What became of it: queued, merged, unchanged, told, full, cancelled or nothing.
        """
        now = self._now()
        return self._store.run(lambda db: admission.put(db, now, sink, notice, delay_s, repeat))

    def knows(self, notice: Notice) -> bool:
        """Whether any receiver has been told, or will be, that this incident began and is not over, if need be as a page."""
        least = _rows.PAGE_RANK if notice.tier is Tier.PAGE else 0

        def body(db: sqlite3.Connection) -> bool:
            told = db.execute("SELECT 1 FROM incident WHERE key=? AND rank>=? AND state='open'", (notice.key, least)).fetchone()
            query = f"SELECT 1 FROM message WHERE key=? AND rank>=? AND action='trigger' AND {WAITING}"
            return bool(told or db.execute(query, (notice.key, least)).fetchone())

        return self._store.run(body)

    def is_open(self, sink: Sink, key: str) -> bool:
        """Whether this receiver has taken the incident's trigger and not its resolve."""
        query = "SELECT 1 FROM incident WHERE sink=? AND key=? AND state='open'"
        return self._store.run(lambda db: db.execute(query, (sink.name, key)).fetchone() is not None)

    def due(self, sink: Sink) -> Message | None:
        """The message to send next; the earlier of an incident always goes first."""
        now = self._now()
        query = f"""
            SELECT id, version, attempts, key, event, notice FROM message AS m
            WHERE sink=? AND {WAITING} AND next_at<=? AND NOT EXISTS (
                SELECT 1 FROM message AS e WHERE e.sink=m.sink AND e.key=m.key AND e.id<m.id AND e.{WAITING})
            ORDER BY rank DESC, id LIMIT 1"""

        def body(db: sqlite3.Connection) -> Message | None:
            row = db.execute(query, (sink.name, now)).fetchone()
            if row is None:
                return None
            number, version, attempts, key, event, blob = row
            notice = _rows.decode(blob)
            if notice is None:
                db.execute("UPDATE message SET state='dead', error='unreadable' WHERE id=?", (number,))
                return None
            told = _rows.told(db, sink.name, key)
            opened, last = (None, None) if told is None or told.state == "closed" else (told.opened, told.last)
            delivery = Delivery(notice=notice, event_id=event, at=now, opened=opened, last=last)
            return Message(number, version, attempts, delivery)

        return self._store.run(body)

    def wait_s(self, sink: Sink, most_s: float) -> float:
        """Seconds until something may be due."""
        query = f"SELECT MIN(next_at) FROM message WHERE sink=? AND {WAITING}"
        resend = "SELECT MIN(next_at) FROM incident WHERE sink=? AND next_at IS NOT NULL"

        def body(db: sqlite3.Connection) -> list[float]:
            found = (db.execute(q, (sink.name,)).fetchone()[0] for q in (query, resend))
            return [t for t in found if t is not None]

        times = self._store.run(body)
        return min(max(min(times, default=1e18) - self._now(), 0.01), most_s)

    def begin(self, message: Message) -> bool:
        """Write down that an attempt begins; False when the message is no longer to be sent as it was read.

        Bit 1 of `unsure` is set while an attempt goes on, and stays where the process dies in it; bit 2 when the
        outcome of an earlier one is not known. Either way the receiver may know the incident.
        """
        query = f"""UPDATE message SET attempts=attempts+1, unsure=CASE WHEN unsure & 1 THEN 3 ELSE unsure | 1 END, updated=?
            WHERE id=? AND version=? AND {WAITING}"""
        return self._store.run(lambda db: db.execute(query, (self._now(), message.id, message.version)).rowcount == 1)

    def sent(self, sink: Sink, message: Message) -> None:
        """The receiver took it."""
        now, notice = self._now(), message.delivery.notice

        def body(db: sqlite3.Connection) -> None:
            done = "UPDATE message SET state='sent', error='', updated=? WHERE id=? AND version=?"
            if db.execute(done, (now, message.id, message.version)).rowcount == 0:
                admission.merged_meanwhile(db, now, sink, message.id, notice)
            _rows.count(db, sink.name, "sent")
            if notice.action is Action.ACKNOWLEDGE:
                return
            told = _rows.told(db, sink.name, notice.key)
            rank, content = _rows.rank(notice), _rows.content(notice)
            if notice.action is Action.RESOLVE:
                opened, last = (notice, notice) if told is None else (told.opened, told.last)
                again = now + sink.resend_s if sink.resend_s and sink.resend_resolved_s else None
                over = Told("closed", opened, last, content, rank, now)
                _rows.believe(db, sink.name, notice.key, over, again, now + sink.resend_resolved_s)
            else:
                opened = told.opened if told is not None and told.is_open else notice
                again = now + sink.resend_s if sink.resend_s else None
                _rows.believe(db, sink.name, notice.key, Told("open", opened, notice, content, rank, now), again, None)

        self._store.run(body)

    def failed(
        self, sink: Sink, message: Message, error: str, *, unsure: bool, retry_after_s: float | None = None
    ) -> float:
        """The receiver did not take it: it is tried again after ×2, with jitter, at most `CAP_S`. Returns the seconds."""
        wait = min(CAP_S, BASE_S * 2.0 ** min(message.attempts, 20)) * (0.5 + self._jitter() / 2)
        if retry_after_s is not None:
            wait = max(wait, min(retry_after_s, ASKED_CAP_S))
        now, key = self._now(), message.delivery.notice.key

        def body(db: sqlite3.Connection) -> None:
            _rows.count(db, sink.name, "failed")
            query = f"""UPDATE message SET state='failed', unsure=(unsure & 2) | ?, error=?, next_at=?, updated=?
                WHERE id=? AND {WAITING}"""
            row = (2 if unsure else 0, error[:300], now + wait, now, message.id)
            if db.execute(query, row).rowcount or unsure:
                return
            # Its resolve came while it was on its way, and it never arrived: nothing is left to resolve.
            first = "SELECT unsure & 2 FROM message WHERE id=?"
            told, before = _rows.told(db, sink.name, key), db.execute(first, (message.id,)).fetchone()
            end = _rows.waiting(db, sink.name, key).get(Action.RESOLVE.value)
            if end is not None and not end.attempts and before == (0,) and (told is None or not told.is_open):
                admission.cancel(db, end.id, now)
                db.execute("DELETE FROM incident WHERE sink=? AND key=? AND state='unsure'", (sink.name, key))

        self._store.run(body)
        return wait

    def dead(self, sink: Sink, message: Message, error: str) -> None:
        """The receiver rejected it for good."""

        def body(db: sqlite3.Connection) -> None:
            _rows.count(db, sink.name, "dead")
            query = f"UPDATE message SET state='dead', unsure=0, error=?, updated=? WHERE id=? AND version=? AND {WAITING}"
            db.execute(query, (error[:300], self._now(), message.id, message.version))

        self._store.run(body)

    def resend(self, sink: Sink) -> Delivery | None:
        """An incident that this receiver wants to hear of again."""
        now = self._now()
        query = f"""
            SELECT state, opened, last, sent_at, key FROM incident AS i
            WHERE sink=? AND next_at<=? AND NOT EXISTS (
                SELECT 1 FROM message AS m WHERE m.sink=i.sink AND m.key=i.key AND m.{WAITING} AND m.next_at<=?)
            ORDER BY next_at LIMIT 1"""
        row = self._store.run(lambda db: db.execute(query, (sink.name, now, now)).fetchone())
        if row is None:
            return None
        state, opened_blob, last_blob, sent_at, key = row
        opened, last = _rows.decode(opened_blob), _rows.decode(last_blob)
        if opened is None or last is None:
            self._store.run(lambda db: db.execute("DELETE FROM incident WHERE sink=? AND key=?", (sink.name, key)))
            return None
        if state == "closed":  # with the moment at which it ended
            last_ = msgspec.structs.replace(last, action=Action.RESOLVE)
            return Delivery(notice=last_, event_id=uuid.uuid4().hex, at=sent_at, opened=opened, last=last)
        return Delivery(notice=last, event_id=uuid.uuid4().hex, at=now, opened=opened, last=last)

    def resent(self, sink: Sink, key: str, after_s: float) -> None:
        """Plan the next telling; an incident that is over is told for `resend_resolved_s` only."""
        at = self._now() + after_s
        query = "UPDATE incident SET next_at=CASE WHEN until IS NOT NULL AND until<? THEN NULL ELSE ? END WHERE sink=? AND key=?"
        self._store.run(lambda db: db.execute(query, (at, at, sink.name, key)))

    def hurry(self, *, dead: bool = False) -> int:
        """Make everything that waits due now, with `dead` also what was rejected; returns how many wait."""
        now = self._now()

        def body(db: sqlite3.Connection) -> int:
            if dead:
                revive = """UPDATE message SET state='pending', attempts=0, next_at=? WHERE state='dead' AND NOT EXISTS (
                    SELECT 1 FROM message AS o WHERE o.sink=message.sink AND o.key=message.key AND o.id>message.id)"""
                db.execute(revive, (now,))
            return db.execute(f"UPDATE message SET next_at=? WHERE {WAITING}", (now,)).rowcount

        return self._store.run(body)

    def waits(self) -> int:
        """Messages that are not sent yet."""
        query = f"SELECT COUNT(*) FROM message WHERE {WAITING}"
        return self._store.run(lambda db: int(db.execute(query).fetchone()[0]))

    def answered(self, sink: Sink) -> None:
        """The receiver is up: what failed because it could not be reached is due now."""
        query = "UPDATE message SET next_at=? WHERE sink=? AND state='failed' AND unsure=0 AND next_at>?"
        now = self._now()
        self._store.run(lambda db: db.execute(query, (now, sink.name, now)))

    def prune(self) -> list[str]:
        """Give up what is too old, forget what is long done, repair times after a clock jump; says what was given up."""
        now = self._now()

        def body(db: sqlite3.Connection) -> list[str]:
            db.execute(f"UPDATE message SET next_at=? WHERE {WAITING} AND next_at>?", (now, now + ASKED_CAP_S + CAP_S))
            db.execute("UPDATE incident SET next_at=? WHERE next_at>?", (now, now + ASKED_CAP_S + CAP_S))
            query = f"SELECT id, sink, key, error FROM message WHERE {WAITING} AND created<?"
            old = db.execute(query, (now - MOST_AGE_S,)).fetchall()
            for number, sink, _, _ in old:
                db.execute("UPDATE message SET state='dead' WHERE id=?", (number,))
                _rows.count(db, sink, "dead")
            db.execute(
                f"""DELETE FROM message WHERE NOT {WAITING} AND id <= (
                    SELECT id FROM message WHERE NOT {WAITING} ORDER BY id DESC LIMIT 1 OFFSET ?)""",
                (KEPT,),
            )
            db.execute(
                """DELETE FROM incident WHERE state='closed' AND next_at IS NULL AND sent_at <= (
                    SELECT sent_at FROM incident WHERE state='closed' ORDER BY sent_at DESC LIMIT 1 OFFSET ?)""",
                (KEPT,),
            )
            return [f"{sink}: {key} was not delivered in three days and is given up ({error})" for _, sink, key, error in old]

        return self._store.run(body)
