"""oracle/collect/spans.py: which elements of parameters an optimizer's flat tensors hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from proctor.oracle.collect.spans import Span, find_spans

RNG = np.random.default_rng(0)


def parameters(*sizes: int, constant: tuple[int, ...] = ()) -> dict[str, Any]:
    return {f"p{i}": np.full(n, float(i % 2), np.float32) if i in constant else RNG.standard_normal(n).astype(np.float32) for i, n in enumerate(sizes)}


def covered(found: list[list[Span]], flats: list[Any], values: dict[str, Any]) -> int:
    """Elements that were placed; each is held against the parameter."""
    count = 0
    for flat, spans in zip(flats, found, strict=True):
        for span in spans:
            length = span.stop - span.start
            assert np.array_equal(flat[span.at : span.at + length], values[span.name][span.start : span.stop])
            count += length
    return count


def test_flat_shards_of_two_ranks_are_placed() -> None:
    values = parameters(40, 7, 300, 12, constant=(1, 3))
    whole = np.concatenate(list(values.values()))
    half = len(whole) // 2
    for part in (whole[:half], whole[half:]):
        found = find_spans([part], values)
        assert covered(found, [part], values) == len(part)
    names = [s.name for s in find_spans([whole], values)[0]]
    assert names == ["p0", "p1", "p2", "p3"]


def test_buckets_that_are_filled_from_the_end() -> None:
    values = parameters(40, 16, 60, 16, 30, constant=(1, 3))
    flat = np.concatenate(list(reversed(values.values())))
    (found,) = find_spans([flat], values)
    assert [s.name for s in found] == ["p4", "p3", "p2", "p1", "p0"]


def test_padding_is_in_no_span() -> None:
    values = parameters(40, 24)
    flat = np.concatenate([*values.values(), np.zeros(64, np.float32)])
    (found,) = find_spans([flat], values)
    assert sum(s.stop - s.start for s in found) == 64


def test_a_copy_of_each_parameter() -> None:
    values = parameters(40, 16, 30, 16, constant=(1, 3))
    found = find_spans(list(values.values()), values)
    assert [[s.name for s in spans] for spans in found] == [["p0"], ["p1"], ["p2"], ["p3"]]


def test_strangers_are_placed_nowhere() -> None:
    assert find_spans([RNG.standard_normal(50).astype(np.float32)], parameters(40, 30)) == [[]]
    assert find_spans([np.zeros(0, np.float32)], parameters(40)) == [[]]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_whatever_is_placed_is_right(sizes: list[int], ranks: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = {f"p{i}": draw.standard_normal(n).astype(np.float32) for i, n in enumerate(sizes)}
    whole = np.concatenate(list(values.values()))
    flats = [part for part in np.array_split(whole, ranks) if part.size >= 16]
    assert covered([find_spans([f], values)[0] for f in flats], flats, values) >= sum(f.size for f in flats) * 0.5
