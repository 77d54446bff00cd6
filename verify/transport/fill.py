"""Finds records that did not reach the verifier in the trace files of the run, where it can read them.

The files have the rows of a process in the order of their numbers (`frames.Flush.at`), in batches of any size; batches before
the ones that are missing are skipped by their heads. All or nothing: calls without their states would be judged wrongly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
from pyarrow import ipc

from proctor.invariants.schema import TABLES
from proctor.invariants.wire.arrow_message import MARK, PREFIX, ArrowHead, arrow_head
from proctor.invariants.wire.checksum import is_sound
from proctor.verify.transport.inbox import Gap

MAX_FILLED_ROWS: Final = 8 << 20
WAIT_S: Final = 2.0  # for rows that the process has not written yet: it writes once a second
_MAX_META: Final = 1 << 24
_POLL_S: Final = 0.02
_DECODABLE: Final = ("names", "context")


@dataclass(frozen=True)
class Filled:
    """What was found of a gap.

    records: all of it, or names and contexts only, which later records need.
    missing: rows that were not found; 0: the gap is closed.
    why: one clause, when not.
    """

    records: dict[str, pa.Table]
    missing: int
    why: str = ""


def fill(
    run: Path,
    gap: Gap,
    *,
    wait_s: float = WAIT_S,
    max_rows: int = MAX_FILLED_ROWS,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Filled:
    """Read what is missing.

    Args:
        run: run directory.
        gap: as the server told it.
        wait_s: for rows that are not in the files yet; 0 when the process is gone.
        max_rows: that are read, at most.
    """
    folder = run / "procs" / gap.folder
    if gap.folder in ("", ".", "..") or os.sep in gap.folder or not folder.is_dir():
        return Filled({}, gap.rows, "its files are not here")
    until = now() + wait_s
    found: dict[str, pa.Table] = {}
    why = f"{gap.rows} records are more than {max_rows}" if gap.rows > max_rows else ""
    for table in sorted(TABLES, key=lambda t: t not in _DECODABLE):
        begin, end = gap.spans.get(table, (0, 0))
        if begin >= end or end - begin > max_rows or (why and table not in _DECODABLE):
            continue
        while True:
            rows, problem = _rows(folder / f"{table}.arrow", table, begin, end)
            left = until - now()
            if rows.num_rows == end - begin or problem or left <= 0:
                break
            sleep(min(_POLL_S, left))
        found[table] = rows
        if rows.num_rows < end - begin and not why:
            why = problem or f"{table}: {end - begin - rows.num_rows} records are not in its files"
    if why:
        kept = {table: rows for table, rows in found.items() if table in _DECODABLE}
        return Filled(kept, gap.rows - sum(rows.num_rows for rows in kept.values()) or 1, why)
    return Filled(found, 0)


def _rows(path: Path, table: str, begin: int, end: int) -> tuple[pa.Table, str]:
    """Rows of a stream file by number, as far as they are there; and what is wrong with the file."""
    batches: list[pa.RecordBatch] = []
    problem = ""
    try:
        with open(path, "rb") as file:
            at = 0
            while at < end and (head := _head(file)) is not None:
                at = at if head.at is None else head.at
                batch = _body(file, table, head, wanted=at + head.rows > begin and at < end)
                if batch is not None:
                    first = max(begin - at, 0)
                    batches.append(batch.slice(first, min(end - at, head.rows) - first))
                at += head.rows
            if at >= end and sum(batch.num_rows for batch in batches) < end - begin:
                problem = f"{path.name}: records are missing in it"
    except (pa.ArrowException, OSError, ValueError) as e:
        problem = f"{path.name}: {type(e).__name__}"
    return pa.Table.from_batches(batches, schema=TABLES[table]), problem


def _head(file: BinaryIO) -> ArrowHead | None:
    """What the next message says of itself; the schema is passed over. None where the file ends, or is not whole."""
    size = os.fstat(file.fileno()).st_size
    while True:
        start = file.tell()
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            return None
        mark, length = PREFIX.unpack(prefix)
        if mark != MARK or length > _MAX_META:
            raise ValueError("no Arrow stream")
        meta = file.read(length)
        if not length or len(meta) < length:
            return None
        head = arrow_head(meta)
        if head is None and not start:
            continue
        if head is None or head.body < 0 or head.rows < 0:
            raise ValueError("no record batch")
        if file.tell() + head.body > size:
            return None
        file.seek(start)
        return head


def _body(file: BinaryIO, table: str, head: ArrowHead, wanted: bool) -> pa.RecordBatch | None:
    """The batch whose head was read, or nothing but a step over it."""
    start = file.tell()
    _, length = PREFIX.unpack(file.read(PREFIX.size))
    size = PREFIX.size + length + head.body
    file.seek(start if wanted else start + size)
    if not wanted:
        return None
    batch, said = ipc.open_stream(_with_schema(table, file.read(size))).read_next_batch_with_custom_metadata()
    batch.validate(full=True)
    if not is_sound(batch, said):
        raise ValueError("its checksum is another")
    if batch.num_rows != head.rows:
        raise ValueError("another number of rows")
    return batch


def _with_schema(table: str, message: bytes) -> pa.Buffer:
    """A stream of one batch: only there Arrow tells what was written with it."""
    return pa.py_buffer(TABLES[table].serialize().to_pybytes() + message)
