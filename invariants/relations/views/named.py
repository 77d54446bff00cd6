"""Calls of functions by name, the call that a row belongs to, and the context of a row, found with arrays: a query costs more than some hundred rows do.

`frames` hands these on; relations ask there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from proctor.invariants.relations.views.cache import lasting, memo
from proctor.invariants.schema import CallFlag, Name
from proctor.invariants.trace import Trace
from proctor.invariants.trace.grouping import Array, last_match, numbers

UNTOLD: Final = -(1 << 31)  # step of a context that is not known
_SMALL: Final = 1 << 16  # calls: of a longer run views that are as long as they are not kept


def has_flag(frame: pl.DataFrame, flag: int) -> Array:
    """Which rows have one of these flags."""
    return np.asarray((frame["flags"].to_numpy() & int(flag)) != 0)


def columns(frame: pl.DataFrame, *names: str) -> list[Array]:
    """Columns as arrays; a step that is not known is one that no record has."""
    return [numbers(frame[name], UNTOLD) for name in names]


def functions_like(trace: Trace, names: Sequence[str]) -> pl.DataFrame:
    """Codes of functions that match one of these regular expressions (whole name): fn."""

    def make(trace: Trace) -> pl.DataFrame:
        pattern = re.compile("|".join(f"(?:{n})" for n in names))
        codes = [code for code, text in enumerate(trace.functions) if pattern.fullmatch(text)]
        return pl.DataFrame({"fn": pl.Series(codes, dtype=pl.UInt32)})

    return lasting(trace, Name.FUNCTION, ("functions", *names), make)


def calls_of(trace: Trace, *names: str) -> pl.DataFrame:
    """Calls of functions whose names match these regular expressions, with step and phase.

    Those that an exception ended are left out: what they should have done cannot be asked of them.
    """
    if trace.calls.height > _SMALL:
        return _calls_of(trace, names)
    return memo(trace, f"calls of {' '.join(names)}", lambda t: _calls_of(t, names))


def _calls_of(trace: Trace, names: Sequence[str]) -> pl.DataFrame:
    codes = functions_like(trace, names)["fn"].to_numpy()
    mine = np.isin(trace.calls["fn"].to_numpy(), codes) if len(codes) else np.zeros(0, dtype=bool)
    found = trace.calls[np.flatnonzero(mine)]
    if found.height and (raised := has_flag(found, CallFlag.RAISED)).any():
        found = found[np.flatnonzero(~raised)]
    return found.hstack(of_context(trace, found, "step", "phase"))


def call_at(trace: Trace, rows: pl.DataFrame) -> Array:
    """The place among the calls of the one that each row (proc, seq) belongs to, -1 where there is none."""
    wanted, held = (tuple(columns(table, "proc", "seq")) for table in (rows, trace.calls))
    if trace.calls.height <= _SMALL:
        return last_match(wanted, held)
    near = np.flatnonzero(np.isin(held[1], wanted[1]))
    found: Array = np.append(near, -1)[last_match(wanted, tuple(column[near] for column in held))]
    return found


def function_names(trace: Trace, codes: pl.Series) -> pl.Series:
    """Names of functions by their codes, null where a code is not known."""
    names = lasting(trace, Name.FUNCTION, "names of functions", lambda t: pl.Series([*t.functions, None], dtype=pl.String))
    found: pl.Series = names[np.minimum(numbers(codes, len(names) - 1), len(names) - 1)]
    return found


def of_context(trace: Trace, table: pl.DataFrame, *names: str) -> list[pl.Series]:
    """These columns of the contexts of rows, null where a context is not known."""
    told, at = memo(trace, f"contexts by code {' '.join(names)}", lambda t: contexts_by_code(t, names))
    columns: list[pl.Series] = told[at[np.minimum(table["ctx"].to_numpy(), len(at) - 1)]].get_columns()
    return columns


def contexts_by_code(trace: Trace, names: Sequence[str]) -> tuple[pl.DataFrame, Array]:
    """These columns of all contexts, then a row of nulls; the row of each code, the last code being one that is not known."""
    told = trace.contexts[list(names)]
    codes = trace.contexts["ctx"].to_numpy()
    at = np.full(int(codes.max(initial=0)) + 2, told.height, dtype=np.int64)
    at[codes] = np.arange(told.height)
    return told.vstack(pl.DataFrame({name: [None] for name in names}, schema=told.schema)), at
