"""Contexts of the processes of a run that goes on: in which step a record was made, and what else its context says."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from proctor.invariants.schema import CONTEXT
from proctor.invariants.windows import PROLOGUE

Array = np.ndarray[Any, Any]

KEY: Final = (pl.col("proc").cast(pl.UInt64) * (1 << 32) + pl.col("ctx").cast(pl.UInt64)).alias("_key")
"""A context: the process, by its number, and its code there."""


class Contexts:
    """Contexts of all processes; what every row is looked up in lies in arrays that are sorted by process and code."""

    def __init__(self) -> None:
        empty = framed(CONTEXT).select(KEY, pl.lit(0, dtype=pl.UInt16).alias("proc"), *CONTEXT.names)
        self._frames = [empty]
        self._keys, self._steps = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int32)
        self._looks = np.zeros(0, dtype=np.uint64)  # hash of all that a context says but its step
        self._room = 1 << 10  # contexts that may be held until it is looked which are needed

    def add(self, rows: pl.DataFrame) -> None:
        keyed = rows.select(KEY, "proc", *CONTEXT.names).unique("_key", keep="last").sort("_key")
        self._frames.append(keyed)
        keys, steps = keyed["_key"].to_numpy(), keyed["step"].fill_null(-1).to_numpy()
        looks = keyed.drop("_key", "proc", "ctx", "step").hash_rows().to_numpy()
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
        if len(self._frames) > 1:
            self._frames = [pl.concat(self._frames).unique("_key", keep="last", maintain_order=True).sort("_key")]
        return self._frames[0]

    def prune(self, before: int, carried: pl.DataFrame) -> None:
        """Let go of those of steps before this one, but for the first steps and those of these rows."""
        if len(self._keys) <= self._room:
            return
        needed = (pl.col("step") < PROLOGUE) | (pl.col("step") >= before)
        used = pl.col("_key").is_in(carried["_key"].unique().implode())
        kept = self.frame().filter(needed.fill_null(value=True) | used)
        self._frames = [kept]
        mine = np.isin(self._keys, kept["_key"].to_numpy(), assume_unique=True)
        self._keys, self._steps, self._looks = self._keys[mine], self._steps[mine], self._looks[mine]
        self._room = max(1 << 10, 2 * len(self._keys))


def framed(schema: pa.Schema) -> pl.DataFrame:
    """An empty frame of these columns, and `proc` for those of records."""
    frame = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([], schema=schema)))
    return frame.with_columns(pl.lit(0, dtype=pl.UInt16).alias("proc")) if "ctx" in frame.columns else frame
