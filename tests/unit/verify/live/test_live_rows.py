"""Rows as arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from proctor.invariants.schema import STATES
from proctor.verify.live import rows as _rows


def batch(**columns: list[int | None]) -> pa.RecordBatch:
    size = len(next(iter(columns.values())))
    arrays = [pa.array(columns.get(field.name, [0] * size), type=field.type) for field in STATES]
    return pa.RecordBatch.from_arrays(arrays, schema=STATES)


def test_batches_become_columns_of_their_types() -> None:
    rows = _rows.read([batch(fp=[1, 2**64 - 1], flags=[0, 255]), batch(fp=[3])])
    assert list(rows) == STATES.names and _rows.height(rows) == 3
    assert rows["fp"].dtype == np.uint64 and rows["fp"].tolist() == [1, 2**64 - 1, 3]
    assert rows["flags"].dtype == np.uint8 and rows["norm"].dtype == np.float32
    assert all(rows[name].dtype == column.dtype for name, column in _rows.none_of(STATES).items())


def test_a_value_that_a_stranger_left_out_is_0() -> None:
    rows = _rows.read([batch(var=[None, 7])])
    assert rows["var"].dtype == np.uint32 and rows["var"].tolist() == [0, 7]


@pytest.mark.parametrize("parts", [[0, 4], [0, 2, 4], [0, 1, 3, 4]])
def test_the_last_state_of_each_variable_stays_in_order(parts: list[int]) -> None:
    whole = {"proc": np.array([0, 1, 0, 0], dtype=np.uint16), "var": np.array([5, 5, 6, 5], dtype=np.uint32), "fp": np.arange(4, dtype=np.uint64)}
    cut = [_rows.pick(whole, np.arange(a, b)) for a, b in pairwise(parts)]
    kept = _rows.last_states(cut) if len(cut) > 1 else _rows.last_states([*cut, _rows.pick(whole, np.arange(0))])
    assert kept["fp"].tolist() == [1, 2, 3]


def test_rows_are_put_by_process_and_keep_their_order_there() -> None:
    rows = {"proc": np.array([1, 0, 1, 0], dtype=np.uint16), "fp": np.arange(4, dtype=np.uint64)}
    assert _rows.by_process(rows)["fp"].tolist() == [1, 3, 0, 2]
