"""What a recorded process and the verifier say to each other, as bytes.

A frame is 24 bytes of head, a msgpack object (one `Message`), and for records a body: Arrow IPC record batch messages,
uncompressed, of the tables of `invariants.schema`, one after the other. Little endian::

    0  magic "PRF1"     4  kind u8      5  zero u8    6  zero u16
    8  channel u32     12  number u32  16  object u32, its bytes     20  body u32, its bytes

A *channel* is one process of a connection: a relay carries many. *number* counts the frames of a channel in one direction,
from 0: a frame that a carrier lost or doubled is noticed. Integers, text and Arrow metadata are checked before anything is
allocated by what they say; compressed batches are refused, because a few bytes can ask for any amount of memory.

The records of a process are numbered in the order in which it lets go of them, each table from 0 (`Flush.at`): what did not
arrive is known by its numbers, and is found by them in the trace files, which have the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyarrow import ipc

from proctor.errors import TransportError
from proctor.invariants.schema import TABLES, TRACE_SCHEMA
from proctor.invariants.wire.arrow_message import MARK, PREFIX, Encoded, Unread, Usual, arrow_head

MAGIC: Final = b"PRF1"
HEAD: Final = struct.Struct("<4sBBHIIII")
MAX_OBJECT: Final = 1 << 20  # bytes of the msgpack object: a process.json with all its notes
MAX_BODY: Final = 16 << 20  # bytes of records in one frame
MAX_ROWS: Final = 1 << 20  # of one table in one frame
MAX_GLANCES: Final = 4096  # rows of one frame
HANDSHAKE_OBJECT: Final = 512  # bytes that a peer may send before it has proved that it knows the token

ORDER: Final = tuple(sorted(TABLES))  # of the tables in `Flush`
_USUAL: Final = {table: Usual(schema) for table, schema in TABLES.items()}

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Nonce = Annotated[bytes, Meta(min_length=16, max_length=64)]
ProcessName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.~-]{0,127}\Z")]
Short = Annotated[str, Meta(max_length=256)]


class FrameError(TransportError):
    """Bytes that are no frame of ours.

    Args:
        reason: in two or three words, for counting.
    """

    code = "PR-E501"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Challenge(msgspec.Struct, frozen=True):
    """Verifier → peer, first of all: prove that you know the token."""

    nonce: Nonce


class Proof(msgspec.Struct, frozen=True):
    """Peer → verifier: the proof, and a challenge in turn."""

    nonce: Nonce
    proof: Nonce
    role: Short  # "rank" or "relay"


class Accepted(msgspec.Struct, frozen=True):
    """Verifier → peer: the verifier's own proof."""

    proof: Nonce


class Hello(msgspec.Struct, frozen=True):
    """A process introduces itself on a channel."""

    process: ProcessName  # its folder under `RUN/procs`
    host: Short
    start: Short  # differs between two lives of a process of this name
    info: dict[str, Any]  # its process.json
    schema: Count = TRACE_SCHEMA


class Welcome(msgspec.Struct, frozen=True):
    """Verifier → process: the last flush that arrived, -1 for none."""

    have: Annotated[int, Meta(ge=-1, lt=1 << 62)]


class Flush(msgspec.Struct, frozen=True):
    """Records that a process lets go of together; lists are in the order of `ORDER`.

    Args:
        n: number of the flush in its process, from 0.
        reached: the step that the process was in: all before it are whole. -1: none yet.
        at: number of the first row of each table.
        rows: rows of each table.
        sizes: bytes of each table in the body; 0 where there are no rows.
        again: names and contexts of a flush that was lost, said once more.
    """

    n: Count
    reached: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    at: Annotated[tuple[Count, ...], Meta(min_length=len(ORDER), max_length=len(ORDER))]
    rows: Annotated[tuple[Count, ...], Meta(min_length=len(ORDER), max_length=len(ORDER))]
    sizes: Annotated[tuple[Count, ...], Meta(min_length=len(ORDER), max_length=len(ORDER))]
    again: bool = False


class Info(msgspec.Struct, frozen=True):
    """The `process.json` of a process has changed."""

    info: dict[str, Any]


class Bye(msgspec.Struct, frozen=True):
    """This side of the channel is done."""

    why: Short = "bye"


class Freeze(msgspec.Struct, frozen=True):
    """Verifier → process: keep what you hold of the last steps, and look at the next ones in full; without a key only that."""

    key: Short
    step: Annotated[int, Meta(ge=-1, lt=1 << 31)]


class Glances(msgspec.Struct, frozen=True):
    """Process → verifier: fingerprints of pieces of parameters, after updates that it did not record in full.

    Args:
        names: of pieces.
        rows: step, place in `names`, fingerprint.
    """

    names: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=MAX_GLANCES)]
    rows: Annotated[list[tuple[Count, Count, Annotated[int, Meta(ge=0)]]], Meta(max_length=MAX_GLANCES)]


class Ping(msgspec.Struct, frozen=True):
    """I am there."""


Message = Challenge | Proof | Accepted | Hello | Welcome | Flush | Info | Bye | Freeze | Ping | Glances

_KINDS: Final[dict[int, type[Any]]] = {
    1: Challenge, 2: Proof, 3: Accepted, 4: Hello, 5: Welcome, 6: Flush, 7: Info, 8: Bye, 9: Freeze, 10: Ping, 11: Glances,
}  # fmt: skip
_KIND_OF: Final = {cls: kind for kind, cls in _KINDS.items()}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame; its object is not decoded yet."""

    kind: int
    channel: int
    number: int
    object: bytes
    body: bytes

    def message(self) -> Message:
        """Decode the object.

        Raises:
            FrameError: it is not one of this kind.
        """
        try:
            message: Message = _DECODERS[self.kind].decode(self.object)
        except (msgspec.MsgspecError, RecursionError, ValueError) as e:
            raise FrameError("malformed message", f"{_KINDS[self.kind].__name__}: {str(e)[:160]}") from None
        if self.body and not isinstance(message, Flush):
            raise FrameError("malformed message", "a body where none belongs")
        return message

    def to(self, channel: int, number: int) -> bytes:
        """The frame as bytes, on another channel: what a relay does."""
        return wrap(self.kind, self.object, channel=channel, number=number, body=(self.body,))


def kind_of(message: type[Message]) -> int:
    return _KIND_OF[message]


def encode(message: Message, *, channel: int = 0, number: int = 0, body: Sequence[bytes] = ()) -> bytes:
    """A message as a frame."""
    return wrap(_KIND_OF[type(message)], _ENCODER.encode(message), channel=channel, number=number, body=body)


def encode_object(message: Message) -> bytes:
    """The object of a frame, for `wrap`."""
    return _ENCODER.encode(message)


def wrap(kind: int, data: bytes, *, channel: int = 0, number: int = 0, body: Sequence[bytes] = ()) -> bytes:
    """A frame of an object that is encoded already."""
    size = sum(map(len, body))
    return b"".join((HEAD.pack(MAGIC, kind, 0, 0, channel, number & 0xFFFFFFFF, len(data), size), data, *body))


class Decoder:
    """Cuts a byte stream into frames, however it is chunked. Holds at most one unfinished frame.

    Args:
        max_object, max_body: bytes that a frame may have; see `allow`.
    """

    def __init__(self, max_object: int = MAX_OBJECT, max_body: int = MAX_BODY) -> None:
        self._buffer = bytearray()
        self._max_object, self._max_body = max_object, max_body
        self._broken: FrameError | None = None

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole."""
        return len(self._buffer)

    def allow(self, max_object: int = MAX_OBJECT, max_body: int = MAX_BODY) -> None:
        """Change the limits for frames to come."""
        self._max_object, self._max_body = max_object, max_body

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Take bytes, give the frames that they finish. All of them count under the limits of now.

        Raises:
            FrameError: the bytes are no frame, or one over the limits; the stream cannot be read any further.
        """
        self._buffer += data
        frames = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def put(self, data: bytes | memoryview) -> None:
        """Take bytes; `next` gives the frames one by one, so that limits can change between two."""
        self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame.

        Raises:
            FrameError: as `feed`.
        """
        if self._broken is not None:
            raise self._broken
        buffer = self._buffer
        if len(buffer) < HEAD.size:
            if not MAGIC.startswith(buffer[: len(MAGIC)]):
                raise self._fail("not a frame")
            return None
        magic, kind, zero, zeros, channel, number, size, body = HEAD.unpack_from(buffer)
        if magic != MAGIC or zero or zeros:
            raise self._fail("not a frame")
        if kind not in _KINDS:
            raise self._fail("unknown kind", str(kind))
        if size > self._max_object or body > self._max_body:
            raise self._fail("oversize", f"{size} + {body} bytes")
        end = HEAD.size + size + body
        if len(buffer) < end:
            return None
        middle = HEAD.size + size
        frame = Frame(kind, channel, number, bytes(buffer[HEAD.size : middle]), bytes(buffer[middle:end]))
        del buffer[:end]
        return frame

    def _fail(self, reason: str, detail: str = "") -> FrameError:
        self._broken = FrameError(reason, detail)
        self._buffer.clear()
        return self._broken


def pack(batches: Mapping[str, Encoded]) -> tuple[tuple[int, ...], tuple[int, ...], list[bytes]]:
    """Records as `Flush.rows`, `Flush.sizes` and the body; no batch is empty."""
    there = [batches.get(table) for table in ORDER]
    rows = tuple(0 if batch is None else batch.rows for batch in there)
    sizes = tuple(0 if batch is None else len(batch.message) for batch in there)
    return rows, sizes, [batch.message for batch in there if batch is not None]


class Records(Mapping[str, pa.RecordBatch]):
    """Valid records of some tables. Arrow reads those of the usual form when they are asked for, in the thread that asks."""

    def __init__(self, found: dict[str, pa.RecordBatch | Unread]) -> None:
        self._found = found

    def __getitem__(self, table: str) -> pa.RecordBatch:
        held = self._found[table]
        if isinstance(held, Unread):
            held = self._found[table] = held.batch()
        return held

    def unread(self) -> Iterator[tuple[str, pa.RecordBatch | Unread]]:
        """The tables, as far as nobody has asked for them as messages."""
        return iter(self._found.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def unpack(flush: Flush, body: bytes) -> Records:
    """The records of a flush, validated; they look into `body`, nothing is copied.

    Raises:
        FrameError: anything in it is not what it should be.
    """
    if sum(flush.sizes) != len(body):
        raise FrameError("malformed records", "sizes do not add up")
    found: dict[str, pa.RecordBatch | Unread] = {}
    whole, begin = pa.py_buffer(body), 0
    for table, rows, size in zip(ORDER, flush.rows, flush.sizes, strict=True):
        if not size and not rows:
            continue
        data = whole.slice(begin, size)
        usual = _USUAL[table]
        valid = 0 < rows <= MAX_ROWS and usual.rows(memoryview(data)) == rows
        found[table] = Unread(rows, data, usual) if valid else _read_batch(table, data, rows)
        begin += size
    return Records(found)


def _read_batch(table: str, data: pa.Buffer, rows: int) -> pa.RecordBatch:
    schema, view = TABLES[table], memoryview(data)
    mark, size = PREFIX.unpack_from(view) if len(view) >= PREFIX.size else (0, 0)
    if mark != MARK or not 0 < size <= len(view) - PREFIX.size:
        raise FrameError("malformed records", f"{table}: no Arrow message")
    meta = bytes(view[PREFIX.size : PREFIX.size + size])
    try:
        head = arrow_head(meta)
    except ValueError as e:
        raise FrameError("malformed records", str(e)) from None
    if head is None or head.rows != rows or not 0 < rows <= MAX_ROWS:
        raise FrameError("malformed records", f"{table}: another number of rows")
    if head.nulls or len(schema) != head.columns:
        raise FrameError("malformed records", f"{table}: nulls, or other columns")
    if head.compressed:
        raise FrameError("compressed records", table)
    try:
        batch = ipc.read_record_batch(ipc.read_message(data), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as e:
        raise FrameError("malformed records", f"{table}: {str(e).splitlines()[0][:120] if str(e) else e!r}") from None
    return batch
