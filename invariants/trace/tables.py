"""One table of one process: an Arrow stream, written in batches that carry a checksum, read up to its last sound batch.

Traces of earlier versions have no checksums and are read without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import ipc

from proctor.errors import TraceError
from proctor.invariants.schema import TABLES
from proctor.invariants.wire.arrow_message import MARK, PREFIX, arrow_head
from proctor.invariants.wire.checksum import is_sound

if TYPE_CHECKING:
    import polars as pl

    from proctor.invariants.trace.windows import Sieve

_MAX_META: Final = 1 << 24  # bytes of a message's metadata
_SIFTED_ROWS: Final = 1 << 17  # that go through a sieve at a time


class Table(NamedTuple):
    """What could be read.

    rows: those that the sieve let through.
    readable: how many rows could be read, before the sieve.
    cut: a sentence on what could not be read; "" when that is nothing.
    damaged: what could not be read is no mere end that a killed process did not write.
    context: of the last row that could be read; -1 without one.
    """

    rows: pa.Table
    readable: int
    cut: str = ""
    damaged: bool = False
    context: int = -1


def read_stream(path: Path, table: str, sieve: Sieve | None = None) -> tuple[pa.Table, str]:
    """Rows and `cut` of `read_table`."""
    read = read_table(path, table, sieve)
    return read.rows, read.cut


def read_table(path: Path, table: str, sieve: Sieve | None = None) -> Table:
    """Read one Arrow stream up to its last whole and sound batch.

    Args:
        path: the file.
        table: whose columns it has.
        sieve: keep only the rows that it lets through.

    Raises:
        TraceError: the file is no Arrow stream, or a stream of other columns.
    """
    schema = TABLES[table]
    if not path.is_file():
        if path.exists():
            raise TraceError(f"{path}: not a regular file")
        return Table(no_rows(schema), 0, f"{path.name}: missing", damaged=True)
    try:
        with pa.OSFile(str(path), "rb") as source:
            return _read(source, path, table, sieve)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}") from None


def _read(source: pa.NativeFile, path: Path, table: str, sieve: Sieve | None) -> Table:
    schema, end = TABLES[table], source.size()
    if end == 0:
        return Table(no_rows(schema), 0)
    head = source.read(PREFIX.size)
    if len(head) < PREFIX.size:
        return Table(no_rows(schema), 0, f"{path.name}: cut before its header")
    mark, length = PREFIX.unpack(head)
    if mark != MARK or not 0 < length <= _MAX_META:
        raise TraceError(f"{path}: not a Proctor trace (no Arrow stream header)")
    source.seek(0)
    try:
        reader = ipc.open_stream(source)
    except (pa.ArrowException, OSError, ValueError):
        if length + PREFIX.size > end:
            return Table(no_rows(schema), 0, f"{path.name}: cut inside its header")
        raise TraceError(f"{path}: not a Proctor trace (unreadable Arrow header)") from None
    if not reader.schema.equals(schema):
        raise TraceError(
            f"{path}: columns {_columns(reader.schema)} are not those of a {table} table",
            hint="record the run again with this version",
        )
    batches: list[pa.RecordBatch] = []
    whole: list[pa.Table] = []
    rows, sifted, context, cut, damaged = 0, 0, -1, "", False
    while True:
        begin = source.tell()
        try:
            _look_ahead(source, end)
            batch, said = reader.read_next_batch_with_custom_metadata()
            batch.validate(full=table in ("names", "context"))
            if any(column.null_count for column in batch.columns):
                raise ValueError("a value is missing")
            if not is_sound(batch, said):
                raise ValueError("its checksum is another")
        except (StopIteration, EOFError):
            break
        except (pa.ArrowException, OSError, ValueError) as e:
            cut = f"{path.name}: cut or damaged after {rows} rows ({_one_line(e)})"
            damaged = not _is_short(source, begin, end)
            break
        rows += batch.num_rows
        if batch.num_rows and "ctx" in schema.names:
            context = batch.column("ctx")[-1].as_py()
        batches.append(batch)
        if sieve is not None and rows - sifted >= _SIFTED_ROWS:
            whole.append(_sift(pa.Table.from_batches(batches, schema=schema), table, sieve))
            batches, sifted = [], rows
    found = pa.Table.from_batches(batches, schema=schema)
    if sieve is not None:
        found = pa.concat_tables([*whole, _sift(found, table, sieve)])
    return Table(found, rows, cut, damaged, context)


def _columns(schema: pa.Schema) -> str:
    try:
        return ", ".join(schema.names[:12])
    except UnicodeDecodeError:  # pyarrow decodes names when they are asked for
        return "whose names are no text"


def lacks(info: Mapping[str, Any], read: Mapping[str, Table]) -> dict[str, str]:
    """Tables of a process that hold less than what it wrote, with a sentence on each.

    A process that was killed may have written the beginning of a batch; all else that cannot be read was there once.

    Args:
        info: its `process.json`. `written`, of newer versions: rows of each table that were in the files before it was.
        read: what could be read.
    """
    said = info.get("written")
    written = {t: n for t, n in said.items() if isinstance(n, int)} if isinstance(said, dict) else {}
    found = {}
    for name, table in read.items():
        wanted = written.get(name, 0)
        if table.readable < wanted:
            found[name] = f"{name}.arrow: {wanted - table.readable} of {wanted} rows are lost"
        elif table.damaged or (table.cut and info.get("finished")):
            found[name] = f"{name}.arrow: rows are lost"
    return found


def first_missing(lacking: Mapping[str, str], read: Mapping[str, Table]) -> int | None:
    """The first step of which rows may be missing: that of the last row before what is lost; -1 before training; None: no rows are."""
    if not lacking:
        return None
    import polars as pl  # late: a training process writes tables and reads none

    contexts = pl.DataFrame(pl.from_arrow(read["context"].rows)).select("ctx", "step")
    last = dict(contexts.iter_rows())
    reached = max(last.values(), default=-1)
    steps = []
    for name in lacking:
        if name == "names":  # written before what refers to it; which rows that is, is not known
            steps.append(-1)
        elif name == "context":
            steps.append(reached)
        else:
            steps.append(last.get(read[name].context, -1))
    return min(steps)


def _look_ahead(source: pa.NativeFile, end: int) -> None:
    """Look at a message's first bytes before Arrow does, which allocates what they say.

    Raises:
        EOFError: the stream ends here.
        ValueError: no message of ours begins here.
    """
    begin = source.tell()
    prefix = source.read(PREFIX.size)
    source.seek(begin)
    if not prefix:
        raise EOFError
    mark, length = PREFIX.unpack(prefix) if len(prefix) == PREFIX.size else (MARK, 1)
    if mark != MARK or length > _MAX_META or begin + PREFIX.size + length > end:
        raise ValueError("no whole message")
    if length == 0:
        raise EOFError


def _is_short(source: pa.NativeFile, begin: int, end: int) -> bool:
    """Whether the message at `begin` is whole but for bytes after the end of the file: what a killed process leaves."""
    source.seek(begin)
    prefix = source.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return True
    mark, length = PREFIX.unpack(prefix)
    if mark != MARK or length > _MAX_META:
        return False
    meta = source.read(length)
    if len(meta) < length:
        return True
    try:
        head = arrow_head(meta)
    except ValueError:
        return False
    return head is not None and begin + PREFIX.size + length + head.body > end


def no_rows(schema: pa.Schema) -> pa.Table:
    """Not `schema.empty_table()`: that imports pandas, a third of a small inference."""
    return pa.Table.from_batches([], schema=schema)


def _sift(table: pa.Table, name: str, sieve: Sieve) -> pa.Table:
    import polars as pl

    frame = pl.DataFrame(pl.from_arrow(table))
    kept = sieve.rows(name, frame)
    return table if kept.height == frame.height else kept.to_arrow().cast(table.schema)


def _one_line(error: Any) -> str:
    text = str(error).strip().splitlines()
    return text[0][:120] if text else type(error).__name__


def empty(table: str) -> pl.DataFrame:
    """A table of a trace without rows."""
    import polars as pl

    frame = pl.DataFrame(pl.from_arrow(no_rows(TABLES[table])))
    return frame.select(pl.lit(0, dtype=pl.UInt16).alias("proc"), *frame.columns).clear()
