"""Frames survive any chunking; bytes that are none are refused before anything is allocated by what they say."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from helpers.live.transport import batch, encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from proctor.invariants.schema import TABLES
from proctor.invariants.wire import frames
from proctor.invariants.wire.frames import (
    Bye,
    Decoder,
    Flush,
    Frame,
    FrameError,
    Freeze,
    Hello,
    Ping,
    Welcome,
)

texts = st.text(max_size=20)
messages = st.one_of(
    st.builds(Welcome, st.integers(-1, 1 << 40)),
    st.builds(Freeze, texts, st.integers(-1, 1 << 30)),
    st.builds(Bye, texts),
    st.just(Ping()),
    st.builds(
        Hello, st.from_regex(r"\A[0-9]{1,4}-[0-9]{1,6}\Z"), texts, texts,
        st.dictionaries(texts, st.one_of(st.integers(-5, 5), texts, st.lists(st.booleans(), max_size=3)), max_size=4),
    ),
)  # fmt: skip


def flush_frame(n: int = 0, **tables: int) -> bytes:
    rows, sizes, body = frames.pack(encoded({t: batch(t, count) for t, count in tables.items()}))
    return frames.encode(Flush(n, n, (0,) * len(frames.ORDER), rows, sizes), number=n, body=body)


def read(frame: Frame) -> dict[str, pa.RecordBatch]:
    message = frame.message()
    assert isinstance(message, Flush)
    return frames.unpack(message, frame.body)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, max_size=8), st.randoms(use_true_random=False), st.integers(0, 1 << 31))
def test_any_chunking_gives_the_same_messages(said: list[frames.Message], chance: object, channel: int) -> None:
    stream = b"".join(frames.encode(m, channel=channel, number=i) for i, m in enumerate(said)) + flush_frame(calls=3, names=2)
    decoder, found, at = Decoder(), [], 0
    while at < len(stream):
        size = chance.choice((1, 2, 3, 24, 25, 100, 5000))  # type: ignore[attr-defined]
        found += decoder.feed(stream[at : at + size])
        at += size
    assert [f.message() for f in found[:-1]] == said
    assert [(f.channel, f.number) for f in found[:-1]] == [(channel, i) for i in range(len(said))]
    assert read(found[-1])["calls"].equals(batch("calls", 3))
    assert decoder.pending == 0


def test_records_of_all_tables_come_back_equal() -> None:
    sent = {table: batch(table, i + 1) for i, table in enumerate(TABLES)}
    rows, sizes, body = frames.pack(encoded(sent))
    assert rows == tuple(sent[t].num_rows for t in frames.ORDER)
    found = frames.unpack(Flush(0, 0, (0,) * 5, rows, sizes), b"".join(body))
    assert found.keys() == sent.keys()
    assert all(found[t].equals(sent[t]) for t in sent)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a frame"),
        (b"\x00", "not a frame"),
        (b"PRF2" + bytes(20), "not a frame"),
        (frames.HEAD.pack(b"PRF1", 6, 1, 0, 0, 0, 1, 0), "not a frame"),
        (frames.HEAD.pack(b"PRF1", 99, 0, 0, 0, 0, 1, 0), "unknown kind"),
        (frames.HEAD.pack(b"PRF1", 6, 0, 0, 0, 0, frames.MAX_OBJECT + 1, 0), "oversize"),
        (frames.HEAD.pack(b"PRF1", 6, 0, 0, 0, 0, 1, frames.MAX_BODY + 1), "oversize"),
    ],
)
def test_what_is_no_frame_is_refused_at_its_head(data: bytes, reason: str) -> None:
    decoder = Decoder()
    with pytest.raises(FrameError) as e:
        decoder.feed(data)
    assert e.value.reason == reason
    with pytest.raises(FrameError):
        decoder.feed(frames.encode(Ping()))


def test_a_message_of_another_shape_is_refused() -> None:
    def decoded(kind: int, thing: object) -> object:
        (frame,) = Decoder().feed(frames.wrap(kind, msgspec.msgpack.encode(thing)))
        return frame.message()

    hello = {"process": "0-1", "host": "h", "start": "s", "info": {}}
    assert isinstance(decoded(4, hello), Hello)
    for wrong in ({**hello, "process": "../../etc"}, {**hello, "process": ".."}, {**hello, "host": "h" * 300}, [], {"info": 1}):
        with pytest.raises(FrameError):
            decoded(4, wrong)
    for wrong_flush in ({"n": -1}, {"n": 0, "reached": 0, "at": [0], "rows": [0], "sizes": [0]}):
        with pytest.raises(FrameError):
            decoded(6, wrong_flush)


def _flush_of(data: bytes, table: str, rows: int) -> tuple[Flush, bytes]:
    where = frames.ORDER.index(table)
    one = [0] * len(frames.ORDER)
    counts, sizes = list(one), list(one)
    counts[where], sizes[where] = rows, len(data)
    return Flush(0, 0, tuple(one), tuple(counts), tuple(sizes)), data


def test_compressed_records_are_refused() -> None:
    packed = batch("calls", 500)
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, packed.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(packed)
    reader = pa.BufferReader(sink.getvalue())
    ipc.read_message(reader)
    message = ipc.read_message(reader).serialize().to_pybytes()
    with pytest.raises(FrameError, match="compressed"):
        frames.unpack(*_flush_of(message, "calls", 500))


def test_records_of_other_columns_or_numbers_are_refused() -> None:
    data = batch("calls", 4).serialize().to_pybytes()
    frames.unpack(*_flush_of(data, "calls", 4))
    with pytest.raises(FrameError):
        frames.unpack(*_flush_of(data, "calls", 5))
    with pytest.raises(FrameError):
        frames.unpack(*_flush_of(data, "names", 4))
    with pytest.raises(FrameError):
        frames.unpack(*_flush_of(data[:-64], "calls", 4))
    with pytest.raises(FrameError):
        frames.unpack(*_flush_of(batch("calls", 4).schema.serialize().to_pybytes(), "calls", 4))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_records_are_refused_or_valid_but_never_worse(data: st.DataObject) -> None:
    whole = bytearray(flush_frame(calls=3, names=2, context=1))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        for frame in Decoder().feed(bytes(whole)):
            if isinstance(frame.message(), Flush):
                for rows in read(frame).values():
                    rows.to_pylist()
    except FrameError:
        pass


def test_text_that_is_not_utf8_is_refused() -> None:
    names = pa.RecordBatch.from_arrays(
        [pa.array([1], pa.uint8()), pa.array([1], pa.uint32()),
         pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")])],
        schema=TABLES["names"],
    )  # fmt: skip
    with pytest.raises(FrameError):
        frames.unpack(*_flush_of(names.serialize().to_pybytes(), "names", 1))
