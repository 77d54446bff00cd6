"""Messages of many ranks read together: the same rows, in the same order, as of each by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.invariants.schema import TABLES
from proctor.invariants.wire import frames
from proctor.invariants.wire.arrow_message import Encoded, Unread
from proctor.verify.live.records import LiveTrace
from proctor.verify.live.rows import columns, read, together

ZERO = tuple(0 for _ in frames.ORDER)


def made(table: str, rows: int, seed: int) -> pa.RecordBatch:
    """Rows of a table, any numbers and some texts."""
    rng = np.random.default_rng(seed)
    arrays: list[Any] = []
    for field in TABLES[table]:
        if pa.types.is_string(field.type):
            arrays.append(pa.array([("train", "", "größer", "x" * int(n))[int(n) % 4] for n in rng.integers(0, 9, rows)]))
        elif pa.types.is_boolean(field.type):
            arrays.append(pa.array(rng.integers(0, 2, rows).astype(bool)))
        else:
            kind = np.dtype(field.type.to_pandas_dtype())
            low, high = (0, 200) if kind.kind in "iu" else (-3, 3)
            arrays.append(pa.array(rng.integers(low, high, rows).astype(kind)))
    return pa.RecordBatch.from_arrays(arrays, schema=TABLES[table])


def sent(table: str, batch: pa.RecordBatch) -> Unread | pa.RecordBatch:
    """As it comes from a rank."""
    rows, sizes, body = frames.pack({table: Encoded.of(batch)})
    return dict(frames.unpack(frames.Flush(0, 0, ZERO, rows, sizes), b"".join(body)).unread())[table]


@pytest.mark.parametrize("table", sorted(TABLES))
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40), own=st.sets(st.integers(0, 39)))
def test_rows_are_those_of_the_messages_one_by_one(table: str, sizes: list[int], own: set[int]) -> None:
    batches = [made(table, rows, seed=i % 3) for i, rows in enumerate(sizes)]
    held = [batch if i in own else sent(table, batch) for i, batch in enumerate(batches)]
    assert all(isinstance(one, Unread) for i, one in enumerate(held) if i not in own)
    assert together(held).equals(pa.concat_batches(batches))
    if table in ("calls", "states", "values"):
        found, wanted = columns(held), read(batches)
        assert {name: column.tolist() for name, column in found.items()} == {name: column.tolist() for name, column in wanted.items()}
        assert {name: column.dtype for name, column in found.items()} == {name: column.dtype for name, column in wanted.items()}


def test_a_trace_of_many_ranks_is_the_same_from_messages_and_from_batches() -> None:
    traces = []
    for read_first in (False, True):
        live = LiveTrace("run", "train.py")
        for step in range(2):
            for rank in range(40):
                batches = {name: made(name, 1 + (rank + step) % 3, seed=step) for name in TABLES}
                rows, sizes, body = frames.pack({name: Encoded.of(batch) for name, batch in batches.items()})
                records = frames.unpack(frames.Flush(step, step, ZERO, rows, sizes), b"".join(body))
                live.add(f"p{rank}", dict(records.items()) if read_first else records, {"rank": rank, "world": 40}, step)
            live.settle()
        traces.append({(name, step): live.rows_of(name, step) for name in ("calls", "states", "values") for step in live.revisions})
    one, other = ({at: rows and {name: column.tolist() for name, column in rows.items()} for at, rows in found.items()} for found in traces)
    assert str(one) == str(other)
    assert any(one.values())


def test_a_damaged_text_is_refused_however_often_it_comes() -> None:
    rows, sizes, body = frames.pack({"context": Encoded.of(made("context", 3, seed=1))})
    whole = b"".join(body)
    at = whole.index("größer".encode())
    broken = whole[: at + 2] + b"\xff" + whole[at + 3 :]
    for message in (broken, broken, whole, broken):
        try:
            frames.unpack(frames.Flush(0, 0, ZERO, rows, sizes), message)
        except frames.FrameError:
            assert message is broken
        else:
            assert message is whole
