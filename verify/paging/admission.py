"""What becomes of a new notice, given what waits for a receiver and what it already believes.

Every branch keeps three things: one message at most waits per incident and action, a trigger goes before its resolve, and a
resolve whose trigger never left cancels both.
"""

from __future__ import annotations

import sqlite3
import uuid
from typing import Final

from proctor.verify.notice import Action, Notice
from proctor.verify.paging import _rows
from proctor.verify.paging._rows import WAITING, Told, Waiting
from proctor.verify.sinks import Sink

MOST_WAITING: Final = 5_000  # messages a receiver
_AFTER_REJECTION_S: Final = 300.0  # between a rejected trigger and the next of its incident


def put(db: sqlite3.Connection, now: float, sink: Sink, notice: Notice, delay_s: float, repeat: bool) -> str:
    """Queue, merge or drop a notice; returns what was done: see `Outbox.put`."""
    waiting = _rows.waiting(db, sink.name, notice.key)
    told = _rows.told(db, sink.name, notice.key)
    if notice.action is Action.RESOLVE:
        return _resolve(db, now, sink, notice, waiting, told)
    end = waiting.get(Action.RESOLVE.value)
    if end is not None and not end.attempts:  # it goes on before anybody heard that it was over
        cancel(db, end.id, now)
        end = None
    same = waiting.get(notice.action.value)
    if same is not None:
        done = _merge(db, now, same, notice)
        if told is not None and told.is_open and _rows.rank(notice) > told.rank and not same.attempts:
            db.execute("UPDATE message SET next_at=MIN(next_at, ?) WHERE id=?", (now, same.id))  # worse does not wait
        return done
    if told is None or not told.is_open or end is not None:
        return _insert(db, now, sink, notice, max(now + delay_s, _not_before(db, now, sink, notice)))
    if told.content == _rows.content(notice):
        return "unchanged"
    worse = _rows.rank(notice) > told.rank
    if not (sink.merges or worse or repeat):
        return "told"
    return _insert(db, now, sink, notice, now if worse else max(now, told.sent_at + sink.update_s))


def cancel(db: sqlite3.Connection, number: int, now: float) -> None:
    """It will not be sent."""
    db.execute("UPDATE message SET state='cancelled', updated=? WHERE id=?", (now, number))


def _resolve(
    db: sqlite3.Connection, now: float, sink: Sink, notice: Notice, waiting: dict[str, Waiting], told: Told | None
) -> str:
    start, end = waiting.get(Action.TRIGGER.value), waiting.get(Action.RESOLVE.value)
    if start is not None:
        cancel(db, start.id, now)
    if end is not None:
        return _merge(db, now, end, notice)
    if told is None or not told.is_open:
        if start is None:
            return "nothing"
        begun = _rows.decode(start.notice)
        if not start.unsure or begun is None:
            return "cancelled"
        unsure = Told("unsure", begun, begun, start.content, _rows.rank(begun), now)
        _rows.believe(db, sink.name, notice.key, unsure, None, None)
    return _insert(db, now, sink, notice, now)


def _not_before(db: sqlite3.Connection, now: float, sink: Sink, notice: Notice) -> float:
    """A receiver that rejected an incident's trigger is not asked again at once."""
    query = "SELECT MAX(updated) FROM message WHERE sink=? AND key=? AND state='dead'"
    rejected = db.execute(query, (sink.name, notice.key)).fetchone()[0]
    return rejected + _AFTER_REJECTION_S if rejected is not None and rejected <= now else now


def _insert(db: sqlite3.Connection, now: float, sink: Sink, notice: Notice, at: float) -> str:
    query = f"SELECT COUNT(*) FROM message WHERE sink=? AND {WAITING}"
    if notice.action is not Action.RESOLVE and db.execute(query, (sink.name,)).fetchone()[0] >= MOST_WAITING:
        return "full"
    db.execute(
        "INSERT INTO message (sink, key, action, event, rank, notice, content, next_at, created, updated,"
        " state, version, attempts, unsure, merged, error) VALUES (?,?,?,?,?,?,?,?,?,?,'pending',0,0,0,0,'')",
        (
            sink.name,
            notice.key,
            notice.action.value,
            uuid.uuid4().hex,
            _rows.rank(notice),
            _rows.encode(notice),
            _rows.content(notice),
            at,
            now,
            now,
        ),
    )
    return "queued"


def _merge(db: sqlite3.Connection, now: float, row: Waiting, notice: Notice) -> str:
    content = _rows.content(notice)
    if row.content == content:
        db.execute("UPDATE message SET merged=merged+1 WHERE id=?", (row.id,))
        return "merged"
    # A receiver may have seen the old text under the old id, and would take the new one for a repetition.
    event = uuid.uuid4().hex if row.attempts else None
    db.execute(
        "UPDATE message SET notice=?, content=?, rank=MAX(rank, ?), merged=merged+1, version=version+1, updated=?,"
        " event=COALESCE(?, event) WHERE id=?",
        (_rows.encode(notice), content, _rows.rank(notice), now, event, row.id),
    )
    return "merged"


def merged_meanwhile(db: sqlite3.Connection, now: float, sink: Sink, number: int, taken: Notice) -> None:
    """More was merged into a message while `taken` was on its way: that is an update of what arrived."""
    row = db.execute(f"SELECT notice FROM message WHERE id=? AND {WAITING}", (number,)).fetchone()
    later = None if row is None else _rows.decode(row[0])
    if later is None:
        return
    worse = _rows.rank(later) > _rows.rank(taken)
    if sink.merges or worse:
        at = now if worse else now + sink.update_s
        query = "UPDATE message SET state='pending', attempts=0, unsure=0, next_at=? WHERE id=?"
        db.execute(query, (at, number))
    else:
        db.execute("UPDATE message SET state='sent', updated=? WHERE id=?", (now, number))


__all__ = ["MOST_WAITING", "cancel", "merged_meanwhile", "put"]
