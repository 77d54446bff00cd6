"""`invariants.grouping`: what it says of rows is what counting them one by one says."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from proctor.invariants.trace.grouping import Groups, alike, last_match

Row = tuple[int, int, int, bool]
KEYS = st.tuples(st.integers(-1, 3), st.sampled_from([0, 1, (1 << 32) - 1]), st.integers(0, 2), st.booleans())
ROWS = st.lists(KEYS, max_size=40)


def columns(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    a, b, value, told = zip(*rows, strict=True) if rows else ((), (), (), ())
    return np.array(a, np.int32), np.array(b, np.uint32), np.array(value, np.uint64), np.array(told, bool)


def grouped(rows: list[Row]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (a, b, _, _) in enumerate(rows):
        found[a, b].append(i)
    return found  # in the order of their first rows, as dictionaries are


@given(ROWS)
def test_groups_are_those_of_a_dictionary(rows: list[Row]) -> None:
    a, b, value, told = columns(rows)
    groups, wanted = Groups(a, b), list(grouped(rows).values())
    assert groups.first.tolist() == [mine[0] for mine in wanted]
    assert groups.last.tolist() == [mine[-1] for mine in wanted]
    assert groups.sizes.tolist() == [len(mine) for mine in wanted]
    assert groups.any(told).tolist() == [any(rows[i][3] for i in mine) for mine in wanted]
    assert groups.uniform(value).tolist() == [len({rows[i][2] for i in mine}) == 1 for mine in wanted]
    assert groups.distinct(value).tolist() == [len({rows[i][2] for i in mine}) for mine in wanted]
    assert alike(a, b).tolist() == [next(mine[0] for mine in wanted if i in mine) for i in range(len(rows))]


@given(ROWS)
def test_what_is_said_of_each_row_counts_those_of_its_group_before(rows: list[Row]) -> None:
    a, b, _, told = columns(rows)
    groups, wanted = Groups(a, b), grouped(rows)
    before = [[i for i in wanted[row[0], row[1]] if i < at] for at, row in enumerate(rows)]
    assert groups.previous().tolist() == [mine[-1] if mine else -1 for mine in before]
    assert groups.running(told).tolist() == [sum(rows[i][3] for i in [*mine, at]) for at, mine in enumerate(before)]


@given(ROWS, st.data())
def test_rows_of_some_groups_are_one_group_after_the_other(rows: list[Row], data: st.DataObject) -> None:
    a, b, _, _ = columns(rows)
    wanted = list(grouped(rows).values())
    chosen = data.draw(st.lists(st.integers(0, len(wanted) - 1), unique=True) if wanted else st.just([]))
    found, bounds = Groups(a, b).rows(np.array(chosen, dtype=np.int64))
    assert [found[i:j].tolist() for i, j in pairwise(bounds)] == [wanted[c] for c in chosen]


@given(ROWS, ROWS)
def test_a_row_is_matched_with_the_last_that_is_the_same(wanted: list[Row], held: list[Row]) -> None:
    found = last_match(columns(wanted)[:2], columns(held)[:2])
    last = {(a, b): i for i, (a, b, _, _) in enumerate(held)}
    assert found.tolist() == [last.get((a, b), -1) for a, b, _, _ in wanted]
