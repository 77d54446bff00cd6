"""Which calls enclose which, from the number of the enclosing call that each row has.

`contain`, `sequence`, `argument` and `course` ask. Rows of one process: `train` 1, `forward` 2 in 1, `linear` 3 in 2; so `train` contains both.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.relations.views.cache import memo
from proctor.invariants.trace import Trace

_MAX_DEPTH: Final = 12  # enclosing calls looked at
_ONE, _MIX = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)


def enclosing(trace: Trace) -> np.ndarray[Any, Any]:
    """Row of the enclosing call of each row of `trace.calls`; -1 without one."""
    return memo(trace, "enclosing", _enclosing)


def _enclosing(trace: Trace) -> np.ndarray[Any, Any]:
    proc = trace.calls["proc"].to_numpy().astype(np.uint64) << np.uint64(32)
    key = proc | trace.calls["seq"].to_numpy().astype(np.uint64)
    parent = trace.calls["parent"].to_numpy()
    wanted = proc | parent.astype(np.uint64)
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], wanted)
    at[at >= len(key)] = 0
    where = order[at] if len(key) else at
    found = (parent != 0) & (key[where] == wanted) if len(key) else np.zeros(0, dtype=bool)
    return np.where(found, where, -1)


def around(trace: Trace, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of the calls that enclose these, at any depth."""
    up = enclosing(trace)
    found = [np.zeros(0, dtype=np.int64)]
    within = up[rows]
    while (within := np.unique(within[within >= 0])).size:
        found.append(within)
        within = up[within]
    return np.unique(np.concatenate(found))


def contained(trace: Trace, parents: np.ndarray[Any, Any], children: np.ndarray[Any, Any]) -> pl.DataFrame:
    """Which functions each call contains at any depth: row (of the enclosing call), child (function code).

    Args:
        parents: by function code, true where its calls are of interest.
        children: likewise for what they contain.
    """
    up = enclosing(trace)
    fn = trace.calls["fn"].to_numpy()
    n_fn = np.uint64(max(len(trace.functions), 1))
    inner = np.flatnonzero(children[fn] & (up >= 0))
    at, child = up[inner], fn[inner].astype(np.uint64)
    found: list[np.ndarray[Any, Any]] = []
    for _ in range(_MAX_DEPTH):
        # A loop's body calls the same function over and over: one pair each, so that every level is smaller.
        pair = pl.Series(at.astype(np.uint64) * n_fn + child).unique().to_numpy()
        at, child = (pair // n_fn).astype(np.int64), pair % n_fn
        found.append(pair[parents[fn[at]]])
        at = up[at]
        at, child = at[at >= 0], child[at >= 0]
        if not len(at):
            break
    pairs = pl.Series("pair", np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)).unique()
    return pl.DataFrame(
        {"row": (pairs // int(n_fn)).cast(pl.UInt32), "child": (pairs % int(n_fn)).cast(pl.UInt32)}
    )


def counted(trace: Trace, parents: np.ndarray[Any, Any], children: np.ndarray[Any, Any]) -> pl.DataFrame:
    """How often each call contains which functions, and on which ways: row (of the enclosing call), child (function code), way, n.

    A way is made of the lines of all calls from the enclosing one down to the child, as a number.

    Args:
        parents: by function code, true where its calls are of interest.
        children: likewise for what they contain.
    """
    up = enclosing(trace)
    fn, site = trace.calls["fn"].to_numpy(), trace.calls["site"].to_numpy().astype(np.uint64)
    inner = np.flatnonzero(children[fn] & (up >= 0))
    once = np.ones(len(inner), dtype=np.uint32)
    level = pl.DataFrame({"row": up[inner], "child": fn[inner], "way": site[inner] + _ONE, "n": once})
    found = [level.clear()]
    for _ in range(_MAX_DEPTH):
        if level.is_empty():
            break
        level = level.group_by("row", "child", "way").agg(pl.col("n").sum())
        at = level["row"].to_numpy()
        found.append(level.filter(pl.Series(parents[fn[at]], dtype=pl.Boolean)))
        way = level["way"].to_numpy() * _MIX + site[at] + _ONE
        level = level.with_columns(pl.Series("row", up[at]), pl.Series("way", way)).filter(pl.col("row") >= 0)
    return pl.concat(found)
