"""Whether a call contains another one each time by chance alone: a number of times that is drawn, and that could as well have been none.

A batch of four images, each of which is cropped with a chance of one half, is cropped 2, 1, 3, 1, 2 times, and in sixteen batches once not at all.
Two healthy runs may have no such batch, the third has one.

The number of times is taken for one of as many draws as there ever were, each with the same chance. Then it is told how many calls without the child
were to be expected. Where that is many, and there was none, it is no draw: the child is there at least once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.trace import Trace

_UNIT: Final = 1_000_000  # whole numbers, so that surveys merge in any order
_FEW: Final = _UNIT // 100  # calls without the child that were to be expected: fewer, and another run has none either
_MANY: Final = 7 * _UNIT  # more, and that there was none has a chance below one in a thousand
_PAIR: Final = ("proc", "fn", "child")
_ALIKE: Final = (*_PAIR, "phase", "grad")  # an evaluation may call it less often, and each time


def by_chance() -> pl.Expr:
    """Whether nothing but chance may have put the child into each call."""
    return pl.col("lacking").is_between(_FEW, _MANY)


def lacking(trace: Trace, parents: np.ndarray[Any, Any], children: np.ndarray[Any, Any]) -> pl.DataFrame:
    """Calls without the child that were to be expected among those that have it: proc, fn (of the enclosing call), child, lacking (in millionths).

    Where one way to the child is gone as often in each call, it is no matter of chance, whatever else is drawn; so where all ways together are.
    """
    rows = _frames.counted(trace, parents, children)
    calls = trace.calls.select("proc", "fn", "ctx").with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    calls = calls.join(trace.contexts.select("ctx", "phase", "grad"), on="ctx", how="left").drop("ctx")
    rows = rows.join(calls, on="row", how="left")
    together = rows.group_by(*_ALIKE, "row").agg(pl.col("n").sum())
    number = together.group_by(_ALIKE).agg(pl.len().alias("calls"))
    ways = pl.concat([_gone(rows, *_ALIKE, "way").drop("way"), _gone(together, *_ALIKE)]).join(number, on=_ALIKE, nulls_equal=True)
    ways = ways.filter(pl.col("gone") == pl.col("calls"))
    none = pl.col("gone") * (1 - pl.col("sum") / (pl.col("gone") * pl.col("most"))) ** pl.col("most")
    least = ways.group_by(_ALIKE).agg((none * _UNIT).round().min().cast(pl.Int64).alias("lacking"))
    return least.group_by(_PAIR).agg(pl.col("lacking").sum())


def _gone(rows: pl.DataFrame, *keys: str) -> pl.DataFrame:
    counts = [pl.len().alias("gone"), pl.col("n").sum().cast(pl.Float64).alias("sum"), pl.col("n").max().alias("most")]
    return rows.group_by(keys).agg(counts)
