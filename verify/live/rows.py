"""Rows as arrays, one a column: what a run that goes on is held in, since a few hundred rows cost a frame more than they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from proctor.invariants.trace.grouping import Array, Rows, are_first, pairs, pick
from proctor.invariants.wire.arrow_message import Unread

Held: TypeAlias = pa.RecordBatch | Unread
_MANY = 16  # messages: fewer are read by Arrow one by one


def read(batches: Sequence[pa.RecordBatch]) -> dict[str, Array]:
    """All columns of these batches, which have the same ones; a trace has all values, and what a stranger leaves out is 0."""
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    columns = {name: whole.column(at) for at, name in enumerate(whole.schema.names)}
    return {name: (c.fill_null(0) if c.null_count else c).to_numpy(zero_copy_only=False) for name, c in columns.items()}


def batch(held: Held) -> pa.RecordBatch:
    return held.batch() if isinstance(held, Unread) else held


def columns(held: Sequence[Held]) -> Rows:
    """All columns of rows of one table of numbers, in their order. Messages of one shape, as all ranks send them in a step, are read together."""
    if len(held) < _MANY:
        return read([batch(one) for one in held])
    shapes: dict[tuple[bytes, int] | None, list[int]] = {}
    for i, one in enumerate(held):
        shapes.setdefault(one.usual.shape(memoryview(one.message)) if isinstance(one, Unread) and one.usual.numeric else None, []).append(i)
    parts, places = [], []
    for shape, which in shapes.items():
        these = [held[i] for i in which]
        parts.append(read([batch(one) for one in these]) if shape is None else these[0].usual.columns(these))
        places.append(np.repeat(np.array(which), [one.num_rows for one in these]))
    return parts[0] if len(parts) == 1 else pick(join(parts), np.argsort(np.concatenate(places), kind="stable"))


def together(held: Sequence[Held]) -> pa.RecordBatch:
    """The rows of all of these, in their order. Of messages that are the same, as those of many ranks, one is read."""
    if len(held) < _MANY:
        return pa.concat_batches([batch(one) for one in held])
    said: dict[bytes, int] = {}
    distinct: list[Held] = []
    which = []
    for one in held:
        key = one.message.to_pybytes() if isinstance(one, Unread) else b""
        at = said.setdefault(key, len(distinct)) if key else len(distinct)
        if at == len(distinct):
            distinct.append(one)
        which.append(at)
    whole = pa.concat_batches([batch(one) for one in distinct])
    if len(distinct) == len(held):
        return whole
    sizes = np.array([one.num_rows for one in distinct])
    starts = np.cumsum(sizes) - sizes
    return whole.take(pa.array(np.concatenate([np.arange(starts[at], starts[at] + sizes[at]) for at in which])))


def none_of(schema: pa.Schema) -> dict[str, Array]:
    """No rows."""
    return {field.name: np.zeros(0, dtype=field.type.to_pandas_dtype()) for field in schema}


def height(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of all of these, which have the same columns, one after the other."""
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def by_process(rows: Rows) -> Rows:
    """Rows by process, those of one as it wrote them."""
    procs = rows["proc"]
    return rows if (procs[1:] >= procs[:-1]).all() else pick(rows, np.argsort(procs, kind="stable"))


def last_states(parts: Sequence[Rows]) -> Rows:
    """The last row of each variable of a process, in the order of these."""
    rows = join(parts)
    if len(parts) == 1:
        return rows
    keys = pairs(rows["proc"], rows["var"])
    return pick(rows, are_first(keys[::-1])[::-1])
