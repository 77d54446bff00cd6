"""Writes a process's tables as Arrow streams from a background thread; degrades instead of failing.

A batch reaches the file in one `write`, and a write that fails (disk full) is cut off again, so the stream stays
readable and later batches can follow. While writing fails the recorder samples steps, ever more sparsely, and the
loss is counted in `process.json`; it recovers by itself when there is room again.

Flush rule: once a second; and when a step ends, if a quarter of a second has passed and enough rows wait. (A batch costs
about 2.5 KB of Arrow metadata over three tables: at every step of a toy that is more than the records.)
"""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from proctor.instrument._guard import Guard, say
from proctor.invariants.schema import TABLES

FLUSH_S = 1.0  # a record is at most this old when it reaches the disk
STEP_FLUSH_S = 0.25  # …and of a finished step at most this old,
STEP_FLUSH_ROWS = 500  # when this many wait


class Stream:
    """One Arrow IPC stream file. Not thread-safe."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._size = 0
        self._buffer = io.BytesIO()
        options = ipc.IpcWriteOptions(compression="zstd")
        self._writer = ipc.new_stream(self._buffer, schema, options=options)
        self._head: bytes | None = self._take()  # the schema message, until it is on disk

    def _take(self) -> bytes:
        blob = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return blob

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one batch whole, or raise OSError and leave the file as it was."""
        self._writer.write_batch(batch)
        body = self._take()
        blob = (self._head or b"") + body
        view = memoryview(blob)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += len(blob)
        self._head = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a small JSON file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


class TraceWriter:
    """Drains the recorder into files every second and at step ends.

    Args:
        folder: `RUN/procs/<rank>-<pid>`, created here.
        drain: gives the pending rows of each table as arrays or tuples and clears them; cheap, under the GIL.
        info: present contents of `process.json`.
        degrade: told `True` when writing begins to fail and `False` when it works again.
    """

    def __init__(
        self,
        folder: Path,
        drain: Callable[[], dict[str, Any]],
        info: Callable[[], dict[str, Any]],
        degrade: Callable[[bool], None],
        guard: Guard,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lost = 0  # rows that could not be written
        self.rows = 0
        self._drain, self._info, self._degrade, self._guard = drain, info, degrade, guard
        self._streams = {table: Stream(folder / f"{table}.arrow", schema) for table, schema in TABLES.items()}
        self._unwritten: list[tuple[str, pa.RecordBatch]] = []  # names and contexts: later rows need them
        self._failing = False
        self._last_info: dict[str, Any] = {}
        self._last_flush = time.monotonic()
        self._wake = threading.Event()
        self._stop = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="proctor-writer", daemon=True)

    def start(self) -> None:
        self.write_info()
        self._thread.start()

    def step_ended(self, waiting: int) -> None:
        """Ask for a flush if it is worth one; called by the training thread, never waits.

        Args:
            waiting: rows that are not written yet.
        """
        if waiting >= STEP_FLUSH_ROWS and time.monotonic() - self._last_flush >= STEP_FLUSH_S:
            self._wake.set()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self._guard.run("writer", self.flush)

    def flush(self) -> None:
        """Write everything pending."""
        with self._lock:
            self._last_flush = time.monotonic()
            tables = self._drain()
            batches = [(t, _batch(t, rows)) for t, rows in tables.items()]
            batches = self._unwritten + [(t, b) for t, b in batches if b.num_rows]
            self._unwritten = []
            failed: OSError | None = None
            for table, batch in batches:
                try:
                    if failed is None:
                        self._streams[table].append(batch)
                        self.rows += batch.num_rows
                        continue
                except OSError as e:
                    failed = e
                if table in ("names", "context"):
                    self._unwritten.append((table, batch))
                else:
                    self.lost += batch.num_rows
            if failed is not None and not self._failing:
                self._failing = True
                say(f"cannot write the trace ({failed.strerror}); sampling until there is room: {self.folder}")
                self._degrade(True)
            elif failed is None and self._failing and batches:
                self._failing = False
                say(f"writing the trace again; {self.lost} records were lost: {self.folder}")
                self._degrade(False)
            info = self._info()
            if info != self._last_info:
                self._write_info(info)

    def write_info(self) -> None:
        with self._lock:
            self._write_info(self._info())

    def _write_info(self, info: dict[str, Any]) -> None:
        try:
            write_json(self.folder / "process.json", info)
            self._last_info = info
        except OSError:
            pass  # the disk is full: said above, and tried again at the next flush

    def close(self) -> None:
        """Flush and stop; safe to call twice, and from `atexit`."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        self._guard.run("writer-close", self.flush)
        for stream in self._streams.values():
            stream.close()


def _batch(table: str, rows: Any) -> pa.RecordBatch:
    """A record batch from a dict of arrays (native recorder) or a list of row tuples; no value is None."""
    schema = TABLES[table]
    if isinstance(rows, dict):
        columns = [rows[f.name] for f in schema]
    else:
        columns = list(zip(*rows)) if rows else [()] * len(schema)
    return pa.RecordBatch.from_arrays([_column(c, f.type) for c, f in zip(columns, schema)], schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array without `pa.array`, which imports pandas: 0.2 s in the training process."""
    if pa.types.is_string(kind):
        texts = [text.encode(errors="replace") for text in values]
        offsets = np.zeros(len(texts) + 1, dtype=np.int32)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return pa.Array.from_buffers(kind, len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))])
    if pa.types.is_boolean(kind):
        data = np.packbits(np.asarray(values, dtype=bool), bitorder="little")
    else:
        data = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])
