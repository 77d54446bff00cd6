"""Rows that are alike, of columns as arrays: of some hundred rows a query costs more than they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from proctor.native import first_seen

Array = np.ndarray[Any, Any]
Rows = Mapping[str, Array]
"""Columns of equal length by name."""


def pick(rows: Rows, which: Array) -> Rows:
    """Those at these places, or where this is true."""
    return {name: column[which] for name, column in rows.items()}


def numbers(column: pl.Series, absent: int) -> Array:
    """A column as an array, with this where it has nothing."""
    whole = column.fill_null(absent) if column.null_count() else column
    return whole.to_numpy()


def classes(values: Array) -> Array:
    """Of each of these numbers the place of the first that is equal.

    Args:
        values: uint64.
    """
    return np.frombuffer(first_seen(np.ascontiguousarray(values)), dtype=np.uint32)


def are_first(values: Array) -> Array:
    """Which of these numbers no earlier one is equal to."""
    first: Array = classes(values) == np.arange(len(values))
    return first


def pairs(high: Array, low: Array) -> Array:
    """Two columns of numbers below 2³² as one."""
    both: Array = high.astype(np.uint64) << np.uint64(32) | low
    return both


def alike(*columns: Array) -> Array:
    """Of each row the place of the first that has the same in all of these columns.

    Args:
        columns: integers of at most 32 bits, or those of which the lower 32 bits tell them apart.
    """
    first, *rest = (column.astype(np.uint32) for column in columns)
    if not rest:
        return classes(first.astype(np.uint64))
    for column in rest:
        first = classes(pairs(first, column))
    return first


def last_match(wanted: tuple[Array, ...], held: tuple[Array, ...]) -> Array:
    """For each row of the one table the last row of the other that is the same in these columns; -1 without one."""
    size = len(held[0])
    if not size:
        return np.full(len(wanted[0]), -1, dtype=np.int64)
    of = alike(*(np.concatenate(both) for both in zip(held, wanted, strict=True)))
    last = np.full(len(of), -1, dtype=np.int64)
    np.maximum.at(last, of[:size], np.arange(size))
    found: Array = last[of[size:]]
    return found


class Groups:
    """Rows that are the same in some columns.

    Args:
        columns: as those of `alike`.

    Attributes:
        of: for each row the first of its group.
        first: the first row of each group, in their order: what other methods give has one entry for each of these.
    """

    def __init__(self, *columns: Array) -> None:
        self.of = alike(*columns)
        self.first = np.flatnonzero(self.of == np.arange(len(self.of)))

    @property
    def last(self) -> Array:
        """The last row of each group."""
        last = np.zeros(len(self.of), dtype=np.int64)
        np.maximum.at(last, self.of, np.arange(len(self.of)))
        found: Array = last[self.first]
        return found

    @property
    def sizes(self) -> Array:
        """How many rows each group has."""
        counted: Array = np.bincount(self.of, minlength=len(self.of))[self.first]
        return counted

    def any(self, told: Array) -> Array:
        """Whether this is true of a row of the group."""
        found = np.zeros(len(self.of), dtype=bool)
        found[self.of[told]] = True
        of_group: Array = found[self.first]
        return of_group

    def uniform(self, values: Array) -> Array:
        """Whether these are the same in all rows of the group."""
        same: Array = ~self.any(values != values[self.of])
        return same

    def previous(self) -> Array:
        """For each row the one before it in its group; -1 for the first."""
        order = np.argsort(self.of, kind="stable")
        found = np.full(len(order), -1, dtype=np.int64)
        found[order[1:]] = np.where(self.of[order[1:]] == self.of[order[:-1]], order[:-1], -1)
        return found

    def distinct(self, values: Array) -> Array:
        """How many different ones of these the rows of the group have."""
        once = alike(self.of, values) == np.arange(len(self.of))
        counted: Array = np.bincount(self.of[once], minlength=len(self.of))[self.first]
        return counted

    def running(self, told: Array) -> Array:
        """For each row of how many of its group this is true up to there."""
        order = np.argsort(self.of, kind="stable")
        counted = np.cumsum(told[order])
        begins = np.flatnonzero(np.diff(self.of[order], prepend=-1))
        before = np.where(begins > 0, counted[begins - 1], 0) if len(begins) else begins
        found = np.empty(len(order), dtype=np.int64)
        found[order] = counted - np.repeat(before, np.diff(np.append(begins, len(order))))
        return found

    def rows(self, chosen: Array) -> tuple[Array, Array]:
        """The rows of some groups.

        Args:
            chosen: numbers of groups.

        Returns:
            rows, those of a group in their order, one group after the other; where in them each group begins, and their end.
        """
        number = np.full(len(self.of), -1, dtype=np.int64)
        number[self.first[chosen]] = np.arange(len(chosen))
        mine = number[self.of]
        rows = np.flatnonzero(mine >= 0)
        rows = rows[np.argsort(mine[rows], kind="stable")]
        return rows, np.searchsorted(mine[rows], np.arange(len(chosen) + 1))
