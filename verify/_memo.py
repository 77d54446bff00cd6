"""What a window of a run looks like, as keys: windows with equal keys differ in numbers, norms and times only.

Training repeats itself. A relation that reads no numbers says of a window what it said of one with the same calls in the
same order, the same contexts (but for the number of the step), and fingerprints that are equal where those were equal.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl

from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace
from proctor.invariants.windows import PROLOGUE

Array = np.ndarray[Any, Any]

_RANDOM: Final = [int(kind) for kind in (Value.BATCH, Value.SAMPLE, Value.DRAW, Value.RNG)]


class Look(NamedTuple):
    """What a window looks like: its calls; also its states and values."""

    calls: bytes
    records: bytes


def look(trace: Trace, now: int, *, draws: bool) -> Look:
    """Digests of all that relations may depend on that say so (`Relation.reads`), but for calls that have not returned.

    Args:
        trace: a window of a run that goes on.
        now: its last step.
        draws: whether batches and random states count, too.
    """
    calls, states = trace.calls, trace.states
    left_out = [int(Value.NUMBER)] if draws else [int(Value.NUMBER), *_RANDOM]
    values = trace.values.filter(~pl.col("kind").is_in(left_out))
    contexts = np.zeros(trace.contexts.height + 1, dtype=np.uint64)
    late = pl.col("step") >= PROLOGUE
    told = trace.contexts.with_columns(pl.when(late).then(pl.col("step") - now + (1 << 24)).otherwise("step").alias("step"))
    contexts[told["ctx"].to_numpy()] = told.drop("ctx").hash_rows().to_numpy()

    digest = hashlib.blake2b(digest_size=16)
    for process in trace.processes:
        digest.update(repr((process.rank, process.world, process.coords, process.dropped > 0)).encode())
    own, parents = _keys(calls, "seq"), _keys(calls, "parent")
    begun = np.unique(own)
    held = states.select("proc", "var", "meta").unique(maintain_order=True)
    _take(
        digest,
        np.searchsorted(begun, own),
        np.where(np.isin(parents, begun), np.searchsorted(begun, parents), -1),
        contexts[calls["ctx"].to_numpy()],
        *(calls[c].to_numpy() for c in ("fn", "site", "args", "ret", "flags")),
        *(held[c].to_numpy() for c in held.columns),
    )
    of_calls = digest.digest()

    seen = [_keys(states, "seq"), _keys(values, "seq")]
    order = np.unique(np.concatenate([own, *seen]))
    _take(
        digest,
        *(np.searchsorted(order, keys) for keys in (own, *seen)),
        _first_seen(np.concatenate([states["fp"].to_numpy(), values["fp"].to_numpy()])),
        *(contexts[frame["ctx"].to_numpy()] for frame in (states, values)),
        *(states[c].to_numpy() for c in ("edge", "var", "meta", "flags")),
        np.searchsorted(order, _keys(states, "call")),
        *(values[c].to_numpy() for c in ("kind", "place", "meta", "flags")),
        _items(trace, values),
    )
    return Look(of_calls, digest.digest())


def _take(digest: hashlib.blake2b, *columns: Array) -> None:
    for column in columns:
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(column).data)


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
