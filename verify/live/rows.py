"""Rows as arrays, one a column: what a run that goes on is held in, since a few hundred rows cost a frame more than they cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from proctor.invariants.trace.grouping import Array, Rows, are_first, pairs, pick


def read(batches: Sequence[pa.RecordBatch]) -> dict[str, Array]:
    """All columns of these batches, which have the same ones; a trace has all values, and what a stranger leaves out is 0."""
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    columns = {name: whole.column(at) for at, name in enumerate(whole.schema.names)}
    return {name: (c.fill_null(0) if c.null_count else c).to_numpy(zero_copy_only=False) for name, c in columns.items()}


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
