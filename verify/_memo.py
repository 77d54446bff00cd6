"""What a window of a run looks like, as a key: windows with equal keys differ in numbers, norms and times only.

Training repeats itself. A relation that reads no numbers says of a window what it said of one with the same calls in the
same order, the same contexts (but for the number of the step), and fingerprints that are equal where those were equal.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import polars as pl

from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace
from proctor.invariants.windows import PROLOGUE

Array = np.ndarray[Any, Any]


def key(trace: Trace, now: int) -> bytes:
    """Digest of all that relations with `structural` may depend on.

    Args:
        trace: a window of a run that goes on.
        now: its last step.
    """
    digest = hashlib.blake2b(digest_size=16)
    for process in trace.processes:
        waiting = [(w.place, w.item) for w in process.waiting]
        digest.update(repr((process.rank, process.world, process.coords, process.dropped > 0, waiting)).encode())
    values = trace.values.filter(pl.col("kind") != int(Value.NUMBER))
    contexts = np.zeros(trace.contexts.height + 1, dtype=np.uint64)
    late = pl.col("step") >= PROLOGUE
    told = trace.contexts.with_columns(pl.when(late).then(pl.col("step") - now + (1 << 24)).otherwise("step").alias("step"))
    contexts[told["ctx"].to_numpy()] = told.drop("ctx").hash_rows().to_numpy()
    keys = {name: _keys(frame, "seq") for name, frame in (("c", trace.calls), ("s", trace.states), ("v", values))}
    order = np.unique(np.concatenate(list(keys.values())))
    parents = _keys(trace.calls, "parent")
    fingerprints = _first_seen(np.concatenate([trace.states["fp"].to_numpy(), values["fp"].to_numpy()]))
    for column in (
        *(np.searchsorted(order, k) for k in keys.values()),
        np.where(np.isin(parents, order), np.searchsorted(order, parents), -1),
        fingerprints,
        *(contexts[frame["ctx"].to_numpy()] for frame in (trace.calls, trace.states, values)),
        *(trace.calls[c].to_numpy() for c in ("fn", "site", "args", "ret", "flags")),
        *(trace.states[c].to_numpy() for c in ("edge", "var", "meta", "flags")),
        np.searchsorted(order, _keys(trace.states, "call")),
        *(values[c].to_numpy() for c in ("kind", "place", "meta", "flags")),
        _items(trace, values),
    ):
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(column).data)
    return digest.digest()


def _keys(frame: pl.DataFrame, column: str) -> Array:
    keys: Array = frame["proc"].to_numpy().astype(np.uint64) << np.uint64(32) | frame[column].to_numpy()
    return keys


def _first_seen(values: Array) -> Array:
    """Each value's number in order of first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: Array = rank[inverse]
    return numbered


def _items(trace: Trace, values: pl.DataFrame) -> Array:
    """Numbers of values at one place; of later steps counted from the first one held, since calls are numbered on."""
    steps = trace.contexts.select("ctx", "step")
    rows = values.select("ctx", "place", "item").join(steps, on="ctx", how="left", maintain_order="left")
    late = pl.col("step") >= PROLOGUE
    base = pl.col("item").filter(late).min().over("place")
    items: Array = rows.select(pl.when(late).then(pl.col("item") - base).otherwise("item"))["item"].to_numpy()
    return items
