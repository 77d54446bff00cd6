"""Messages that we write ourselves read like Arrow's, whatever the rows; the native packing and its twin give the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from proctor.invariants.schema import TABLES
from proctor.invariants.wire import arrow_message, frames
from proctor.invariants.wire.arrow_message import Encoder, Usual, arrow_head
from proctor.invariants.wire.frames import Flush
from proctor.native.twins import columns as twin

try:
    from proctor.native import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

MODULES = [twin, *([native] if native else [])]
KINDS = {
    pa.uint8(): (0, 255),
    pa.uint32(): (0, 2**32 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint64(): (0, 2**64 - 1),
}


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if kind in KINDS:
        return st.integers(*KINDS[kind])
    if pa.types.is_floating(kind):
        return st.floats(width=32 if kind == pa.float32() else 64)
    return st.booleans() if pa.types.is_boolean(kind) else st.text(max_size=12)


def rows_of(table: str) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    return st.lists(st.tuples(*(values(field.type) for field in TABLES[table])), max_size=20)


def columns(table: str, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """As the recorder gives calls: arrays where they are numbers."""
    found: dict[str, Any] = {}
    for field, column in zip(TABLES[table], zip(*rows, strict=True) if rows else ((),) * len(TABLES[table]), strict=True):
        found[field.name] = list(column) if pa.types.is_string(field.type) else np.array(column, dtype=field.type.to_pandas_dtype())
    return found


@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_what_is_encoded_is_what_arrow_reads(table: str, data: st.DataObject) -> None:
    rows = data.draw(rows_of(table))
    encoder = Encoder(TABLES[table])
    encoded = encoder.encode(rows)
    assert encoded == encoder.encode(columns(table, rows))
    if encoded is None:
        assert not rows
        return
    sizes = tuple(len(encoded.message) if t == table else 0 for t in frames.ORDER)
    counts = tuple(encoded.rows if t == table else 0 for t in frames.ORDER)
    found = frames.unpack(Flush(0, 0, (0,) * len(sizes), counts, sizes), encoded.message)[table]
    expected = pa.RecordBatch.from_arrays([pa.array(c, type=f.type) for c, f in zip(zip(*rows, strict=True), TABLES[table], strict=True)], schema=TABLES[table])
    assert len(found) == len(rows)
    for field in TABLES[table]:  # NaN is a value like others
        assert str(found[field.name].to_pylist()) == str(expected[field.name].to_pylist())
    head = arrow_head(expected.serialize().to_pybytes()[8:])
    assert head is not None and (head.rows, head.columns, head.nulls, head.compressed) == (len(rows), len(TABLES[table]), False, False)


@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=200)
@given(data=st.data())
def test_what_is_told_to_be_usual_is_what_arrow_finds_valid(table: str, data: st.DataObject) -> None:
    encoded = Encoder(TABLES[table]).encode(data.draw(rows_of(table).filter(bool)))
    assert encoded is not None
    usual = Usual(TABLES[table])
    assert usual.rows(memoryview(encoded.message)) == encoded.rows
    damaged = bytearray(encoded.message)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from([0, 1, 8, 0x7F, 0x80, 0xC3, 0xFF]))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))]) if data.draw(st.booleans()) else bytes(damaged)
    if rows := usual.rows(memoryview(cut)):
        batch = ipc.read_record_batch(ipc.read_message(pa.py_buffer(cut)), TABLES[table])
        batch.validate(full=True)
        assert len(batch) == rows and not any(column.null_count for column in batch.columns)


@pytest.mark.parametrize(
    ("ends", "text", "valid"),
    [((0, 2, 3), "äx", True), ((0, 1, 3), "äx", False), ((0, 3, 3), "äx", True), ((0, 3, 2), "äx", False), ((1, 2, 3), "äx", False), ((0, 2, 2), "äx", False), ((0, 2, 4), "äx", False)],
)
def test_texts_end_between_characters(ends: tuple[int, ...], text: str, valid: bool) -> None:
    names = [pa.array([0, 0], pa.uint8()), pa.array([1, 2], pa.uint32())]
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 3], np.int32)), pa.py_buffer(text.encode()))
    message = bytearray(pa.RecordBatch.from_arrays([*names, texts], schema=TABLES["names"]).serialize().to_pybytes())
    good = np.array([0, 2, 3], np.int32).tobytes()
    at = message.rindex(good)
    message[at : at + len(good)] = np.array(ends, np.int32).tobytes()
    assert bool(Usual(TABLES["names"]).rows(memoryview(message))) == valid


@pytest.mark.skipif(native is None, reason="the extension was not built")
@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_the_twin_gives_the_same_bytes(table: str, data: st.DataObject) -> None:
    rows = data.draw(rows_of(table))
    told = arguments_of(table)
    for given_rows in (rows, columns(table, rows)):
        assert native.Packer(*told).pack(given_rows) == twin.Packer(*told).pack(given_rows)


@pytest.mark.parametrize("module", MODULES)
def test_several_tables_at_once_are_those_with_rows(module: Any) -> None:
    packers = {table: module.Packer(*arguments_of(table)) for table in ("names", "context")}
    rows = [(0, 1, "a")]
    assert module.pack_tables(packers, {"context": [], "names": rows}) == [("names", *packers["names"].pack(rows))]


def arguments_of(table: str) -> tuple[Any, ...]:
    """What `Encoder` gives a packer."""
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_message, "Packer", lambda *args: seen.append(args))
        Encoder(TABLES[table])
    return seen[0]


@pytest.mark.parametrize("module", MODULES)
def test_values_that_do_not_fit_are_refused_and_text_that_is_no_unicode_is_not(module: Any) -> None:
    def pack(kinds: str, names: tuple[str, ...], rows: Any) -> Any:
        return module.Packer(kinds, names, bytes(200), (0, 8, 16, 80)).pack(rows)

    with pytest.raises(OverflowError):
        pack("B", ("a",), [(256,)])
    with pytest.raises(OverflowError):
        pack("Q", ("a",), [(-1,)])
    with pytest.raises((TypeError, ValueError)):
        pack("I", ("a",), [("x",)])
    with pytest.raises(ValueError, match="columns differ"):
        pack("II", ("a", "b"), {"a": [1, 2], "b": [1]})
    with pytest.raises(ValueError, match=r"a row is no tuple|zip\(\)"):
        pack("II", ("a", "b"), [(1, 2), (3,)])
    assert pack("s", ("a",), [("x\ud800",)])[1].endswith(b"x?" + bytes(6))
    assert pack("I", ("a",), []) is None
    with pytest.raises(ValueError, match="as many names"):
        pack("II", ("a",), [])


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("place", range(4))
def test_a_place_outside_of_the_head_is_refused(module: Any, place: int) -> None:
    places = [0, 8, 16, 32]
    module.Packer("q", ("a",), bytes(64), tuple(places))
    places[place] = 64
    with pytest.raises(ValueError, match="outside of the head"):
        module.Packer("q", ("a",), bytes(64), tuple(places))
