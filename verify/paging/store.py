"""The SQLite file behind the outbox: transactions for several threads and processes, and memory while the disk is full.

WAL with `synchronous=NORMAL`: what was put survives `kill -9` of the process; a power cut may cost the last moments. On
a file system that cannot do WAL (some network ones) SQLite's rollback journal is used. While the disk takes nothing the
file is copied into memory and work goes on there; it is copied back as soon as the disk takes it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from proctor.errors import OutboxError
from proctor.verify.wording import clean

T = TypeVar("T")

SCHEMA: Final = 1
MOST_BYTES: Final = 128 * 1024 * 1024
_PAGE: Final = 4096
_DISK: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_BROKEN: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_TABLES: Final = """
CREATE TABLE message (              -- one notice for one receiver
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    sink TEXT NOT NULL, key TEXT NOT NULL, action TEXT NOT NULL,
    state TEXT NOT NULL,            -- pending, failed (will be tried again), sent, dead, cancelled
    event TEXT NOT NULL,            -- id that the receiver sees, equal at every attempt
    version INTEGER NOT NULL,       -- counts what was merged into it
    rank INTEGER NOT NULL,          -- what is sent first: pages, then by severity
    notice BLOB NOT NULL, content TEXT NOT NULL,
    attempts INTEGER NOT NULL, unsure INTEGER NOT NULL, next_at REAL NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, merged INTEGER NOT NULL, error TEXT NOT NULL);
CREATE UNIQUE INDEX message_waiting ON message (sink, key, action) WHERE state IN ('pending', 'failed');
CREATE INDEX message_state ON message (state, sink);
CREATE TABLE incident (             -- what a receiver believes
    sink TEXT NOT NULL, key TEXT NOT NULL,
    state TEXT NOT NULL,            -- open, unsure (it may have taken the trigger), closed
    opened BLOB NOT NULL, last BLOB NOT NULL, content TEXT NOT NULL, rank INTEGER NOT NULL,
    sent_at REAL NOT NULL, next_at REAL, until REAL,
    PRIMARY KEY (sink, key)) WITHOUT ROWID;
CREATE TABLE mute (
    id INTEGER PRIMARY KEY, sink TEXT NOT NULL, key TEXT NOT NULL, code TEXT NOT NULL,
    until REAL NOT NULL, reason TEXT NOT NULL, by_whom TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE held (                 -- not sent because of a mute or maintenance that is not over
    sink TEXT NOT NULL, key TEXT NOT NULL, notice BLOB NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (sink, key)) WITHOUT ROWID;
CREATE TABLE suppressed (
    sink TEXT NOT NULL, key TEXT NOT NULL, reason TEXT NOT NULL, title TEXT NOT NULL,
    count INTEGER NOT NULL, first REAL NOT NULL, last REAL NOT NULL,
    PRIMARY KEY (sink, key, reason)) WITHOUT ROWID;
CREATE TABLE spent (at REAL NOT NULL, tier TEXT NOT NULL);
CREATE TABLE digest (key TEXT PRIMARY KEY, tier TEXT NOT NULL, notice BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counter (sink TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (sink, name)) WITHOUT ROWID;
"""


class Store:
    """One outbox file.

    Args:
        path: created with its folder when absent, unless `create` is False.
        create: whether it may be created; also puts a broken file aside and begins anew.
        say: told once about each trouble.
        busy_s: how long to wait for another process.
    """

    patience_s = 30.0  # with a process that does not let go of the file

    def __init__(
        self, path: Path, *, create: bool = True, say: Callable[[str], None] = lambda text: None, busy_s: float = 2.0
    ) -> None:
        self.path, self._say, self._busy_s, self._owner = path, say, busy_s, create
        self._lock, self._depth = threading.RLock(), 0
        self._lock_file: int | None = None
        self.durable = True
        self._blind = False  # what is in memory did not begin with what is on the disk
        self._busy_since: float | None = None
        if not create and not path.is_file():
            raise OutboxError(f"{clean(path)} does not exist: no page was queued there")
        try:
            self._db = self._open()
        except OutboxError as error:
            if not create:
                raise
            if error.__cause__ is not None and _code(error.__cause__) in _BROKEN:
                self._aside()
                self._db = self._open()
            else:
                self._db, _ = _memory(None)
                self.durable, self._blind = False, True
                self._say(f"{error.message}; pages are queued in memory until it can be written")

    def run(self, body: Callable[[sqlite3.Connection], T]) -> T:
        """Do something in one transaction; a call within a call joins it. Runs again in memory when the disk is full.

        Raises:
            OutboxError: another process holds the file for too long, or it is broken.
        """
        with self._lock:
            if self._depth:
                return body(self._db)
            try:
                result = self._once(body)
                self._busy_since = None
                return result
            except sqlite3.Error as error:
                if not self._owner or not self.durable or not self._lasting(error):
                    raise _trouble(self.path, error) from error
                self._say(f"{_trouble(self.path, error).message}; pages are queued in memory until it can be written")
                self._to_memory()
                try:
                    return self._once(body)
                except sqlite3.Error as again:
                    raise _trouble(self.path, again) from again

    def back_to_disk(self) -> bool:
        """Try to copy what is in memory to the disk again; whether the store is durable now."""
        with self._lock:
            if self.durable:
                return True
            if self._depth:
                return False
            try:
                disk = self._open()
            except OutboxError:
                return False
            try:
                if self._blind:
                    _add(self._db, disk)
                else:
                    self._db.backup(disk)
                    disk.execute("PRAGMA journal_mode=WAL").fetchone()
            except sqlite3.Error:
                disk.close()
                return False
            self._db.close()
            self._db, self.durable, self._blind = disk, True, False
            self._say(f"{clean(self.path)} can be written again")
            return True

    def claim_sending(self) -> bool:
        """Become the one process that sends from this file; the kernel gives the claim back when a process dies."""
        with self._lock:
            return self._claim()

    def _claim(self) -> bool:
        if self._lock_file is not None:
            return True
        try:
            handle = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return True  # a disk without room for an empty file: better twice than never
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:
            os.close(handle)
            return True  # this file system has no locks
        self._lock_file = handle
        return True

    def release_sending(self) -> None:
        """Give the claim back."""
        with self._lock:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def close(self) -> None:
        """Close the file and give the claim back."""
        with self._lock:
            self.back_to_disk()
            self._db.close()
            self.release_sending()

    def _lasting(self, error: sqlite3.Error) -> bool:
        """Whether waiting does not help: a full disk, or a process that has held the file for long."""
        if _code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return _code(error) in _DISK
        now = time.monotonic()
        if self._busy_since is None:
            self._busy_since = now
        return now - self._busy_since > self.patience_s

    def _once(self, body: Callable[[sqlite3.Connection], T]) -> T:
        self._db.execute("BEGIN IMMEDIATE")
        self._depth += 1
        try:
            result = body(self._db)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth -= 1
        return result

    def _open(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = None
        try:
            if self._owner:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(self.path, timeout=self._busy_s, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA trusted_schema=OFF")
            db.execute(f"PRAGMA max_page_count={MOST_BYTES // _PAGE}")
            db.execute("PRAGMA journal_mode=WAL").fetchone()
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA journal_size_limit=4194304")
            _prepare(db, self.path)
        except (sqlite3.Error, OSError) as error:
            if db is not None:
                db.close()
            raise _trouble(self.path, error) from error
        except OutboxError:
            if db is not None:
                db.close()
            raise
        return db

    def _to_memory(self) -> None:
        memory, self._blind = _memory(self._db)
        self._db.close()
        self._db, self.durable, self._busy_since = memory, False, None

    def _aside(self) -> None:
        """A broken file is kept for people under another name."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.broken-{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
            for end in ("-wal", "-shm"):
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        except OSError as error:
            raise _trouble(self.path, error) from error
        self._say(f"{clean(self.path)} was broken and lies in {clean(aside.name)} now; a new one was begun")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA:
        raise OutboxError(f"{clean(path)} was written by a newer Proctor (schema {found}, known {SCHEMA})", hint="upgrade")
    if found == SCHEMA:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:  # another process may have been faster
            for statement in _TABLES.split(";\n"):
                if statement.strip():
                    db.execute(statement)
            db.execute(f"PRAGMA user_version={SCHEMA}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _memory(source: sqlite3.Connection | None) -> tuple[sqlite3.Connection, bool]:
    """A store in memory, and whether it begins with nothing although there may be something on the disk."""
    blind = source is None
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if source is not None:
        try:
            source.backup(db)
        except sqlite3.Error:  # it cannot even be read: begin with nothing
            db.close()
            db, blind = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False), True
    _prepare(db, Path("memory"))
    return db, blind


def _add(memory: sqlite3.Connection, disk: sqlite3.Connection) -> None:
    """Add what happened in memory to what the disk has, which wins where both know something."""
    disk.execute("BEGIN IMMEDIATE")
    try:
        for (table,) in memory.execute("SELECT name FROM sqlite_schema WHERE type='table' AND name NOT LIKE 'sqlite_%'"):
            rows = memory.execute(f"SELECT * FROM {table}")
            places = ",".join("?" * len(rows.description))
            numbered = table in ("message", "mute")  # their ids mean nothing elsewhere
            disk.executemany(
                f"INSERT OR IGNORE INTO {table} VALUES ({places})", ((None, *r[1:]) if numbered else r for r in rows)
            )
        disk.execute("COMMIT")
    except BaseException:
        if disk.in_transaction:
            disk.execute("ROLLBACK")
        raise


def _code(error: BaseException) -> int:
    """Primary result code of SQLite (sqlite.org/rescode.html); 0 for other errors."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _trouble(path: Path, error: Exception) -> OutboxError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return OutboxError(f"{clean(path)} cannot be used: {clean(why or type(error).__name__, 120)}")
