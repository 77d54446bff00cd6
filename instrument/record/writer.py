"""Writes a process's tables as Arrow streams from a background thread; degrades instead of failing.

A batch reaches the file in one `write`, and a write that fails (disk full) is cut off again, so the stream stays
readable and later batches can follow. A program that closes our descriptors costs nothing (`invariants/descriptor.py`). While writing fails the recorder samples steps, ever more sparsely, and the
loss is counted in `process.json`; it recovers by itself when there is room again.

Flush rule: once a second; and when a step ends, if a quarter of a second has passed and thousands of rows wait. (A batch costs
about 2.5 KB of Arrow metadata over three tables, and half a millisecond of compressing whatever it holds, which also drives the program's data out of the caches.)

With a verifier that listens, rows are handed over to it uncompressed when a step ends (`stream.Sender`), by the training thread itself
where that takes a fraction of a millisecond: no lock, disk or peer is waited for, and waking the writer's thread takes the program's
interpreter lock and its core for longer. Files get the same rows by the rule above, several flushes in one batch, because compressing
costs 0.1 ms a table. Neither waits for the other: a full disk does not stop the stream, nor a dead verifier the files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic  # our own: a program may put another clock into `time`
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import ipc

from proctor.instrument.guard import Guard, say
from proctor.instrument.own_thread import OwnThread
from proctor.invariants.descriptor import Descriptor
from proctor.invariants.files import replace_file
from proctor.invariants.schema import BLIND_FILE, TABLES
from proctor.invariants.wire.arrow_message import Encoded, TableEncoder
from proctor.invariants.wire.checksum import metadata

if TYPE_CHECKING:
    from proctor.instrument.record.stream import Sender

FLUSH_S = 1.0  # a record is at most this old when it reaches the disk
STEP_FLUSH_S = 0.25  # …and of a finished step at most this old,
STEP_FLUSH_ROWS = (500, 8192)  # …when so many wait: in the first seconds, so that a short run that is killed leaves most of itself; and later
FIRST_FLUSHES = 16
STREAM_FLUSH_S = 0.015  # at least, between two flushes to a verifier that tell it of a step's end,
STREAM_FLUSH_MOST_S = 0.06  # and no more than this, so that a step is judged soon, be it the last for a while;
DROWSY_S = 1.0  # where steps are left out
STREAM_SHARE = 0.012  # in between, flushes take this share of a core
STREAM_HERE_ROWS = 1000  # so many the training thread hands over itself
ROOM_S = 5.0  # a disk that took everything for so long has room again; a small batch between two that fail is no sign of it
SETTLING_STEPS = 4  # in which `process.json` is looked at in every flush: world, coordinates


class Stream:
    """One Arrow IPC stream file. Not thread-safe."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self._file = Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._size = 0
        self._buffer = io.BytesIO()
        options = ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        self._writer = ipc.new_stream(self._buffer, schema, options=options)
        self._head: bytes | None = self._take()  # the schema message, until it is on disk

    def _take(self) -> bytes:
        blob = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return blob

    def append(self, batch: pa.RecordBatch, at: int | None = None) -> None:
        """Write one batch whole, or raise OSError and leave the file as it was.

        Args:
            at: number of its first row, where that is not the number of rows before it in the file (`verify/transport/fill.py`).
        """
        self._writer.write_batch(batch, metadata(batch, at))
        body = self._take()
        blob = (self._head or b"") + body
        try:
            self._file.write(blob, self._size)
        except OSError:
            os.ftruncate(self._file.number(), self._size)
            raise
        self._size += len(blob)
        self._head = None

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a small JSON file atomically."""
    replace_file(path, (json.dumps(data, indent=1, sort_keys=True) + "\n").encode(), mode=0o600)


class TraceWriter:
    """Drains the recorder into files every second and at step ends.

    Args:
        folder: `RUN/procs/<rank>-<pid>`, created here.
        drain: gives the pending rows of each table as arrays or tuples and clears them; cheap, under the GIL.
        info: present contents of `process.json`.
        degrade: told `True` when records get lost for want of room on disk and `False` when they do not any more.
        sender: of a verifier that gets the records too.
    """

    def __init__(
        self,
        folder: Path,
        drain: Callable[[], dict[str, Any]],
        info: Callable[[], dict[str, Any]],
        degrade: Callable[[bool], None],
        guard: Guard,
        sender: Sender | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lost = 0  # rows that could not be written
        self.torn = 0  # rows that may be neither in the files nor on their way
        self.rows = 0
        self._drain, self._info, self._degrade, self._guard = drain, info, degrade, guard
        self._at = dict.fromkeys(TABLES, 0)  # rows of each table that were written or lost
        self._written = dict.fromkeys(TABLES, 0)  # …: that were written, so that readers know what is missing
        self._streams = {table: Stream(folder / f"{table}.arrow", schema) for table, schema in TABLES.items()}
        self._sender = sender
        self._unwritten: list[tuple[str, Encoded]] = []  # for the files
        self._failing = self._degraded = False
        self._failed_at = float("-inf")
        self._behind = False  # the verifier missed the last flush
        self._reached = self._offered = self._passed = -1  # the step that the program is in, and the verifier knows of
        self._last_info: dict[str, Any] = {}
        self._looked = float("-inf")  # at what belongs into `process.json`
        self._news = False  # in there, that must be known before the next records are judged
        self._last_flush = self._last_write = self._told_at = monotonic()  # …: when a step's end was offered
        self._flushes = 0
        self._pause = STREAM_FLUSH_S  # between two flushes to a verifier
        self._wake = threading.Event()
        self._drowsy = False  # the present steps are left out: there is nothing to look for many times a second
        self._stop = False
        self._lock = threading.Lock()
        self._thread = OwnThread(self._run)

    @property
    def threads(self) -> list[OwnThread]:
        """Those that write and send."""
        return [self._thread, *([self._sender.thread] if self._sender is not None else [])]

    def start(self) -> None:
        self.write_info()
        self._thread.start()
        if self._sender is not None:
            self._sender.start()

    def step_ended(self, waiting: int, step: int = -1) -> None:
        """Hand over what is pending, or ask for a flush, if it is worth one; called by the training thread, never waits.

        Args:
            waiting: rows that are not written yet.
            step: the one that begins; all rows of those before it are waiting or written.
        """
        self._reached = step
        if self._sender is None:
            if waiting >= self._enough() and monotonic() - self._last_flush >= STEP_FLUSH_S:
                self._wake.set()
        elif monotonic() - self._told_at >= self._pause:
            small = waiting <= STREAM_HERE_ROWS and step >= SETTLING_STEPS and not self._behind and not self._news
            held: list[bool] = []
            try:
                if small:
                    held.extend(map(self._lock.acquire, (False,)))  # one call, so that an interrupt cannot come between taking the lock and knowing of it
                if held and held[0]:
                    self._guard.run("writer", self._hand_over)
                else:
                    self._wake.set()
            except BaseException:  # raised by a signal handler of the program's, who knows where
                self.torn += waiting if held and held[0] else 0
                raise
            finally:
                if held and held[0]:
                    self._lock.release()

    def _enough(self) -> int:
        return STEP_FLUSH_ROWS[self._flushes > FIRST_FLUSHES]

    def passed(self, step: int) -> None:
        """A step begins, and the one before left no rows; the verifier learns of it when the thread flushes."""
        self._passed = step

    def rest(self, drowsy: bool) -> None:
        """Whether the steps that come are left out."""
        self._drowsy = drowsy

    def tell_soon(self) -> None:
        """`process.json` has news that must be known before the records that follow are judged."""
        self._looked, self._news = float("-inf"), True

    def leave_word(self, step: int) -> None:
        """Nothing is written any more, perhaps not `process.json` either; so that it is not taken for a process that was killed."""
        with contextlib.suppress(Exception):
            number = os.open(f"{self.folder}/{BLIND_FILE}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.write(number, f"{step}\n".encode())
            finally:
                os.close(number)

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(FLUSH_S if self._sender is None else DROWSY_S if self._drowsy else STREAM_FLUSH_MOST_S)
            self._wake.clear()
            self._guard.run("writer", self._flush_if_due)

    def _flush_if_due(self) -> None:
        if self._sender is None or self._is_due(monotonic()):
            self.flush()

    def _is_due(self, now: float) -> bool:
        late = self._reached > self._offered and now - self._told_at >= self._pause
        return late or now - self._last_flush >= FLUSH_S or self._write_is_due(now)

    def flush(self) -> None:
        """Write or offer everything pending."""
        with self._lock:
            began = time.thread_time()
            reached, batches = self._take()
            now = self._last_flush
            if self._write_is_due(now):
                self._last_write, self._flushes = now, self._flushes + 1
                self._write()
            if self._sender is None or self._stop or reached < SETTLING_STEPS or now - self._looked >= FLUSH_S:
                self._look_at_info(now)
            self._offer(reached, batches, began)

    def _hand_over(self) -> None:
        """Offer everything pending."""
        began = time.thread_time()
        self._offer(*self._take(), began)

    def _take(self) -> tuple[int, dict[str, Encoded]]:
        """What is pending, which the files get, too; and the step that the program is in."""
        self._last_flush = monotonic()
        self._reached = max(self._reached, self._passed)
        reached = self._reached  # before the rows are taken: those of earlier steps are then among them
        batches = _ENCODER.encode(self._drain())
        self._unwritten += batches
        return reached, dict(batches)

    def _offer(self, reached: int, batches: dict[str, Encoded], began: float) -> None:
        """Give it to the verifier; what it cost since this time of the thread says when the next one may be."""
        if self._sender is None:
            return
        if batches or reached > self._offered:
            self._behind = not self._sender.offer(batches, reached)
            if reached > self._offered:
                self._offered, self._told_at = reached, self._last_flush
        wanted = min(max(STREAM_FLUSH_S, (time.thread_time() - began) / STREAM_SHARE), STREAM_FLUSH_MOST_S)
        self._pause += 0.2 * (wanted - self._pause)

    def _write_is_due(self, now: float) -> bool:
        if self._sender is None or self._stop or now - self._last_write >= FLUSH_S:
            return True
        if self._behind and self._sender.ring.room():
            return True  # what the verifier missed is on disk when it learns of it
        rows = sum(batch.rows for _, batch in self._unwritten)
        return rows >= self._enough() and now - self._last_write >= STEP_FLUSH_S

    def _write(self) -> None:
        """Write what waits for the files; of what cannot be written names and contexts are kept, later rows need them."""
        batches, self._unwritten = _joined(self._unwritten), []
        failed: OSError | None = None
        for table, batch in batches:
            try:
                if failed is None:
                    self._streams[table].append(batch, self._at[table] if self.lost else None)
                    self._at[table] += batch.num_rows
                    self.rows += batch.num_rows
                    self._written[table] += batch.num_rows
                    continue
            except OSError as e:
                failed = e
            if table in ("names", "context"):
                self._unwritten.append((table, Encoded.of(batch)))
            else:
                self.lost += batch.num_rows
                self._at[table] += batch.num_rows
                self._looked = float("-inf")
        if failed is not None:
            self._failed_at = self._last_write
        if failed is not None and not self._failing:
            self._failing = True
            doing = "the verifier gets all records" if self._streams_on() else "sampling until there is room"
            say(f"cannot write the trace ({failed.strerror}); {doing}: {self.folder}")
        elif failed is None and self._failing and batches and self._last_write - self._failed_at >= ROOM_S:
            self._failing = False
            say(f"writing the trace again; {self.lost} records were lost: {self.folder}")
        if self._degraded != (self._failing and not self._streams_on()):
            self._degraded = not self._degraded
            self._degrade(self._degraded)

    def _streams_on(self) -> bool:
        return self._sender is not None and self._sender.connected

    def _look_at_info(self, now: float) -> None:
        self._looked, self._news = now, False
        info = self._info()
        if info != self._last_info:
            self._write_info(info)
            if self._sender is not None:
                self._last_info = info
                self._sender.inform(self.told(info))

    def told(self, info: dict[str, Any]) -> dict[str, Any]:
        """A `process.json` for the verifier: records that are missing in the files only are not missing there."""
        return {**info, "dropped": info.get("dropped", 0) - self.lost}

    def write_info(self) -> None:
        with self._lock:
            self._write_info(self._info())

    def _write_info(self, info: dict[str, Any]) -> None:
        try:
            write_json(self.folder / "process.json", {**info, "written": self._written})
            self._last_info = info
        except OSError:
            pass  # the disk is full: said above, and tried again at the next flush

    def close(self) -> None:
        """Flush and stop; safe to call twice, and from `atexit`."""
        self._stop = True
        self._wake.set()
        self._thread.join(5.0)
        self._guard.run("writer-close", self.flush)
        if self._sender is not None:
            self._guard.run("stream-close", self._sender.close)
        for stream in self._streams.values():
            stream.close()


def _joined(batches: list[tuple[str, Encoded]]) -> list[tuple[str, pa.RecordBatch]]:
    """One batch a table, names and contexts first."""
    found: dict[str, list[pa.RecordBatch]] = {}
    for table, batch in batches:
        found.setdefault(table, []).append(batch.batch(TABLES[table]))
    order = sorted(found, key=lambda t: t not in ("names", "context"))
    return [(t, pa.Table.from_batches(found[t]).combine_chunks().to_batches()[0]) for t in order]


_ENCODER: Final = TableEncoder(TABLES)
