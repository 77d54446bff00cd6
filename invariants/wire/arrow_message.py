"""Record batches as Arrow IPC messages, read and written at their bytes.

A message is a prefix (a mark, and the bytes of its metadata), a flatbuffer of metadata, and the buffers. Of what comes from others
some fields are read before Arrow sees it, so that it never allocates by what a stranger says. Of what a process sends many times a
second the metadata differ in numbers only: `Encoder` takes those that Arrow wrote once and puts the numbers in, which costs a
small part of building arrays and serialising them (`benchmarks/encode.py`).

Message.fbs: version, header_type, header, bodyLength, custom_metadata; RecordBatch: length, nodes, buffers, compression.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from proctor.native import Packer, pack_tables

MARK: Final = 0xFFFFFFFF
PREFIX: Final = struct.Struct("<II")
Rows = Mapping[str, Sequence[Any]] | list[tuple[Any, ...]]  # columns by name, or rows; no value is None
_MAX_COLUMNS: Final = 64
_KNOWN: Final = 512  # heads of messages that are known again: one for each number of rows and place of buffers
_ALIKE: Final = 128, 1 << 12  # messages with text that are known again, as many ranks send them in one step, and their bytes at most
_BATCH: Final = 3  # MessageHeader.RecordBatch
_HEADER_TYPE, _HEADER, _BODY, _CUSTOM = 1, 2, 3, 4  # fields of Message
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3  # fields of RecordBatch


class Encoded(NamedTuple):
    """Some rows of a table.

    message: one uncompressed Arrow IPC record batch, without its schema.
    """

    rows: int
    message: bytes

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Encoded:
        return cls(batch.num_rows, batch.serialize().to_pybytes())

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """The rows; nothing is copied."""
        return ipc.read_record_batch(ipc.read_message(pa.py_buffer(self.message)), schema)


class _Layout(NamedTuple):
    """A message as Arrow writes it for one row, up to its buffers, and where in it the numbers are that tell rows from rows.

    kinds: a letter for each column, `native/columns.h`.
    places: of the bytes of the buffers, of the number of rows, of the columns' nodes and of the buffers' spans.
    """

    kinds: str
    head: bytes
    places: tuple[int, int, int, int]

    @classmethod
    def of(cls, schema: pa.Schema) -> _Layout:
        template = pa.RecordBatch.from_arrays([_one(field.type) for field in schema], schema=schema).serialize().to_pybytes()
        _, size = PREFIX.unpack_from(template)
        meta = template[PREFIX.size : PREFIX.size + size]
        message = _u32(meta, 0)
        batch = _target(meta, _field(meta, message, _HEADER))
        nodes, buffers = (_target(meta, _field(meta, batch, index)) for index in (_NODES, _BUFFERS))
        places = (
            PREFIX.size + _field(meta, message, _BODY),
            PREFIX.size + _field(meta, batch, _LENGTH),
            PREFIX.size + nodes + 4,
            PREFIX.size + buffers + 4,
        )
        return cls("".join(_kind(field.type) for field in schema), template[: PREFIX.size + size], places)


class Encoder:
    """Makes messages of one schema, whose columns are numbers, booleans and text without nulls."""

    def __init__(self, schema: pa.Schema) -> None:
        layout = _Layout.of(schema)
        self.packer = Packer(layout.kinds, tuple(schema.names), layout.head, layout.places)

    def encode(self, rows: Rows) -> Encoded | None:
        """A message of rows; `None` when there are none.

        Raises:
            ValueError, OverflowError, TypeError: a value is not what its column holds.
        """
        made = self.packer.pack(rows)
        return None if made is None else Encoded(*made)


class TableEncoder:
    """Makes messages of several tables in one go, for those who call it with cold caches.

    Args:
        schemas: of the tables, by name.
    """

    def __init__(self, schemas: Mapping[str, pa.Schema]) -> None:
        self._packers = {table: Encoder(schema).packer for table, schema in schemas.items()}

    def encode(self, tables: Mapping[str, Rows]) -> list[tuple[str, Encoded]]:
        """A message of each table that has rows; as `Encoder.encode`."""
        return [(table, Encoded(rows, message)) for table, rows, message in pack_tables(self._packers, tables)]


class Unread(NamedTuple):
    """A valid message that no Arrow object stands for yet: thousands of ranks send several in each step, and many are read at once (`Usual.columns`)."""

    num_rows: int
    message: pa.Buffer
    usual: Usual

    def batch(self) -> pa.RecordBatch:
        """The rows; nothing is copied."""
        return ipc.read_record_batch(ipc.read_message(self.message), self.usual.schema)


class Usual:
    """Tells valid messages of an `Encoder` of the same schema, without Arrow, whose calls give the interpreter lock away."""

    def __init__(self, schema: pa.Schema) -> None:
        layout = _Layout.of(schema)
        self.schema = schema
        self._size = len(layout.head)
        self._widths = [0 if kind in "?s" else np.dtype(kind).itemsize for kind in layout.kinds]
        self._kinds = layout.kinds
        buffers = sum(3 if kind == "s" else 2 for kind in layout.kinds)
        self._numbers = [
            (place, struct.Struct(f"<{count}q"))
            for place, count in zip(layout.places, (1, 1, 2 * len(layout.kinds), 2 * buffers), strict=True)
        ]
        self._blank = self._blanked(layout.head)
        self._known: dict[tuple[bytes, int], int] = {}  # rows, by head and size of messages that were valid; of tables without text these say all
        self._alike: dict[bytes, int] = {}  # rows of messages with text
        self.numeric = not set("?s") & set(layout.kinds)

    def rows(self, message: memoryview) -> int:
        """Rows of a valid message; 0 when it is none, or none of this form."""
        if "s" in self._kinds:
            return self._rows_of_texts(message)
        said = self.shape(message)
        rows = self._known.get(said)
        if rows is None:
            rows = self._rows(message)
            if len(self._known) < _KNOWN:
                self._known[said] = rows
        return rows

    def columns(self, messages: Sequence[Unread]) -> dict[str, np.ndarray[Any, Any]]:
        """The columns of messages of a `numeric` table with one `shape`, one message after the other."""
        first = memoryview(messages[0].message)
        count, (place, spans) = messages[0].num_rows, self._numbers[-1]
        buffers = spans.unpack_from(first, place)[2::4], spans.unpack_from(first, place)[3::4]  # validity, which is empty, and values of each column
        whole = np.frombuffer(b"".join(one.message for one in messages), dtype=np.uint8).reshape(len(messages), len(first))
        columns = {}
        for name, kind, at, size in zip(self.schema.names, self._kinds, *buffers, strict=True):
            values = np.ascontiguousarray(whole[:, self._size + at : self._size + at + size])
            columns[name] = values.view(kind).reshape(len(messages) * count)
        return columns

    def shape(self, message: memoryview) -> tuple[bytes, int]:
        """What messages that can be read together have in common."""
        return bytes(message[: self._size]), len(message)

    def _rows_of_texts(self, message: memoryview) -> int:
        if len(message) > _ALIKE[1]:
            return self._rows(message)
        said = bytes(message)
        rows = self._alike.get(said)
        if rows is None:
            rows = self._rows(message)
            if len(self._alike) >= _ALIKE[0]:
                self._alike.clear()
            self._alike[said] = rows
        return rows

    def _rows(self, message: memoryview) -> int:
        if len(message) < self._size or self._blanked(message[: self._size]) != self._blank:
            return 0
        (size,), (count,), nodes, spans = (numbers.unpack_from(message, place) for place, numbers in self._numbers)
        if size != len(message) - self._size or count <= 0 or nodes != (count, 0) * len(self._kinds):
            return 0
        if any(at % 8 for at in spans[::2]):
            return 0
        buffers = zip(spans[::2], spans[1::2])
        body = message[self._size :]
        columns = zip(self._kinds, self._widths, strict=True)
        return count if all(_is_column(kind, width, count, body, buffers) for kind, width in columns) else 0

    def _blanked(self, head: bytes | memoryview) -> bytearray:
        blank = bytearray(head)
        for place, numbers in self._numbers:
            blank[place : place + numbers.size] = bytes(numbers.size)
        return blank


def _is_column(kind: str, width: int, count: int, body: memoryview, buffers: Iterator[tuple[int, int]]) -> bool:
    """Whether the next buffers are a column without nulls."""
    at, size = next(buffers)  # of validity: every value is there
    if not 0 <= at <= len(body) or size:
        return False
    at, size = next(buffers)
    wanted = (count + 7) // 8 if kind == "?" else (count + 1) * 4 if kind == "s" else count * width
    if at < 0 or size != wanted or at + size > len(body):
        return False
    return kind != "s" or _is_text(body[at : at + size].cast("i").tolist(), body, *next(buffers))


def _is_text(ends: list[int], body: memoryview, at: int, size: int) -> bool:
    """Whether these are the bounds of texts in a span."""
    if at < 0 or size < 0 or at + size > len(body) or ends[0] != 0 or ends[-1] != size or any(b < a for a, b in pairwise(ends)):
        return False
    text = body[at : at + size]
    try:
        str(text, "utf-8")
    except UnicodeDecodeError:
        return False
    return all(text[end] & 0xC0 != 0x80 for end in ends if end < size)


def _kind(of: pa.DataType) -> str:
    """The letter of a column, `native/columns.h`."""
    return "s" if pa.types.is_string(of) else np.dtype(of.to_pandas_dtype()).char.replace("L", "Q").replace("l", "q")


def _one(kind: pa.DataType) -> pa.Array:
    """One value, of no matter what; made without `pa.array`, which imports pandas: 0.2 s in the training process."""
    if pa.types.is_string(kind):
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(8))])


class ArrowHead(NamedTuple):
    """What the metadata of an Arrow message says of a record batch."""

    rows: int
    body: int  # bytes after the metadata
    compressed: bool
    columns: int
    nulls: bool
    at: int | None  # `at` of its custom metadata: number of the first row (`instrument/record/writer.py`)


def arrow_head(meta: bytes) -> ArrowHead | None:
    """Read some fields of a message's flatbuffer, so that Arrow never sees one that would make it allocate.

    Returns:
        None when it is no record batch.

    Raises:
        ValueError: it is damaged.
    """
    try:
        message = _u32(meta, 0)
        kind, header, body = (_field(meta, message, index) for index in (_HEADER_TYPE, _HEADER, _BODY))
        if not kind or not header or meta[kind] != _BATCH:
            return None
        batch = _target(meta, header)
        length, nodes = _field(meta, batch, _LENGTH), _field(meta, batch, _NODES)
        vector = _target(meta, nodes) if nodes else 0
        columns = min(_u32(meta, vector), _MAX_COLUMNS) if nodes else 0
        lengths_nulls = struct.unpack_from(f"<{2 * columns}q", meta, vector + 4)
        return ArrowHead(
            int(struct.unpack_from("<q", meta, length)[0]) if length else 0,
            int(struct.unpack_from("<q", meta, body)[0]) if body else 0,
            _field(meta, batch, _COMPRESSION) != 0,
            columns,
            any(lengths_nulls[1::2]),
            _first_row(meta, _field(meta, message, _CUSTOM)),
        )
    except (struct.error, IndexError, ValueError):
        raise ValueError("damaged Arrow metadata") from None


def _first_row(meta: bytes, pairs: int) -> int | None:
    """The number under the key `at`, which is the first."""
    if not pairs:
        return None
    vector = _target(meta, pairs)
    if not _u32(meta, vector):
        return None
    pair = _target(meta, vector + 4)
    key, value = (_text(meta, _field(meta, pair, index)) for index in (0, 1))
    return int(value) if key == b"at" and value.isdigit() else None


def _text(meta: bytes, at: int) -> bytes:
    if not at:
        return b""
    begin = _target(meta, at)
    size = min(_u32(meta, begin), 32)
    return meta[begin + 4 : begin + 4 + size]


def _u32(meta: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", meta, at)[0])


def _target(meta: bytes, at: int) -> int:
    """Where the offset that is written here leads."""
    return at + _u32(meta, at)


def _field(meta: bytes, table: int, index: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 when it is not set."""
    vtable = table - int(struct.unpack_from("<i", meta, table)[0])
    if vtable < 0:
        raise ValueError("damaged Arrow metadata")
    size = int(struct.unpack_from("<H", meta, vtable)[0])
    at = 4 + 2 * index
    offset = int(struct.unpack_from("<H", meta, vtable + at)[0]) if at + 2 <= size else 0
    return table + offset if offset else 0
