"""Contexts of the processes of a run that goes on: in which step a record was made, and what else its context says."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from proctor.invariants.schema import CONTEXT
from proctor.invariants.trace.grouping import Array, are_first, numbers, pairs
from proctor.invariants.trace.tables import no_rows
from proctor.invariants.trace.windows import PROLOGUE

_SAID: Final = [name for name in CONTEXT.names if name not in ("ctx", "step")]


class Contexts:
    """Contexts of all processes; what every row is looked up in lies in arrays that are sorted by key: process and code."""

    def __init__(self) -> None:
        self._known = _keyed(np.zeros(0, dtype=np.uint64), pl.DataFrame(pl.from_arrow(no_rows(CONTEXT))))
        self._new: list[tuple[Array, pl.DataFrame]] = []  # since that was made
        self._keys, self._steps = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int32)
        self._looks = np.zeros(0, dtype=np.uint64)  # hash of all that a context says but its step
        self._room = 1 << 10  # contexts that may be held until it is looked which are needed

    def add(self, procs: Array, rows: pa.RecordBatch) -> None:
        """Take contexts of some processes; one that is told again is another now."""
        frame = pl.DataFrame(pl.from_arrow(rows))
        keys = pairs(procs, frame["ctx"].to_numpy())
        self._new.append((keys, frame))
        steps = numbers(frame["step"], -1)
        looks = frame[_SAID].hash_rows().to_numpy()
        if len(keys) and (keys[1:] <= keys[:-1]).any():
            last = _last(keys)
            keys, steps, looks = keys[last], steps[last], looks[last]
        kept = np.ones(len(self._keys), dtype=bool)
        if len(keys) and len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            kept[at[self._keys[at] == keys]] = False  # told anew
        merged = np.concatenate([self._keys[kept], keys])
        order = np.argsort(merged, kind="stable")
        self._keys = merged[order]
        self._steps = np.concatenate([self._steps[kept], steps])[order]
        self._looks = np.concatenate([self._looks[kept], looks])[order]

    def of(self, keys: Array) -> tuple[Array, Array]:
        """Step and look of each of these contexts; -1 and 0 where it is not known."""
        if not len(self._keys):
            return np.full(len(keys), -1, dtype=np.int32), np.zeros(len(keys), dtype=np.uint64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[at] == keys
        return np.where(known, self._steps[at], -1), np.where(known, self._looks[at], 0)

    def frame(self) -> pl.DataFrame:
        """All of them: _key and the columns of a trace, sorted."""
        if self._new:
            new, self._new = self._new, []
            frame = pl.concat([self._known.drop("_key", "proc"), *(frame for _, frame in new)])
            keys = np.concatenate([self._known["_key"].to_numpy(), *(keys for keys, _ in new)])
            last = _last(keys)
            self._known = _keyed(keys[last], frame[last])
        return self._known

    def prune(self, before: int, used: Array) -> None:
        """Let go of those of steps before this one, but for the first steps and these keys."""
        if len(self._keys) <= self._room:
            return
        needed = (pl.col("step") < PROLOGUE) | (pl.col("step") >= before)
        known = self.frame()
        kept = known.filter(needed.fill_null(value=True) | pl.Series(np.isin(known["_key"].to_numpy(), used)))
        self._known = kept
        mine = np.isin(self._keys, kept["_key"].to_numpy(), assume_unique=True)
        self._keys, self._steps, self._looks = self._keys[mine], self._steps[mine], self._looks[mine]
        self._room = max(1 << 10, 2 * len(self._keys))


def _last(keys: Array) -> Array:
    """Where each of these is told last, in their order."""
    told = np.flatnonzero(are_first(keys[::-1])[::-1])
    sorted_: Array = told[np.argsort(keys[told])]
    return sorted_


def _keyed(keys: Array, frame: pl.DataFrame) -> pl.DataFrame:
    """_key, proc, and the columns of a trace."""
    procs = (keys >> np.uint64(32)).astype(np.uint16)
    return pl.DataFrame({"_key": keys, "proc": procs, **{name: frame[name] for name in CONTEXT.names}})
