"""oracle/collect/optimizer/spans.py: which elements of parameters an optimizer's flat tensors hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from proctor.oracle.collect.optimizer.spans import Gradients, Span, find_spans

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


def test_gradients_tell_parameters_of_one_value_apart() -> None:
    values = parameters(40, 16, 16, 30, constant=(1, 2))
    values["p2"] = values["p1"].copy()
    grads = {name: RNG.standard_normal(v.size).astype(np.float32) for name, v in values.items()}
    flats = [values["p2"], values["p3"]]
    by_order = find_spans(flats, values)
    assert [[s.name for s in spans] for spans in by_order] == [["p1"], ["p3"]]
    told = find_spans(flats, values, Gradients([grads["p2"], grads["p3"]], grads))
    assert [[s.name for s in spans] for spans in told] == [["p2"], ["p3"]]


def test_a_place_that_gradients_contradict_is_none() -> None:
    values = parameters(40, 16, constant=(1,))
    grads = {name: RNG.standard_normal(v.size).astype(np.float32) for name, v in values.items()}
    stranger = RNG.standard_normal(16).astype(np.float32)
    assert [s.name for s in find_spans([values["p0"], values["p1"]], values, Gradients([grads["p0"], None], grads))[1]] == ["p1"]
    assert find_spans([values["p0"], values["p1"]], values, Gradients([grads["p0"], stranger], grads))[1] == []


def test_gradients_that_are_never_the_parameters_own_say_nothing() -> None:
    values = parameters(40, 16, constant=(1,))
    grads = {name: RNG.standard_normal(v.size).astype(np.float32) for name, v in values.items()}
    summed = Gradients([2 * grads["p0"], 2 * grads["p1"]], grads)  # as after a reduction over ranks
    assert [[s.name for s in spans] for spans in find_spans(list(values.values()), values, summed)] == [["p0"], ["p1"]]
