"""What is done for many lanes at once is what is done lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from proctor.oracle.prove import meanings
from proctor.oracle.prove.by_torch import called, called_many
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.lanes import batched
from proctor.oracle.prove.meanings import Context, Floats
from proctor.oracle.prove.tape import Array, Node

LANES = 3
NUMBERS = np.random.default_rng(5)


def floats(*shape: int) -> Array:
    return NUMBERS.standard_normal((LANES, *shape))


def integers(most: int, *shape: int) -> Array:
    return NUMBERS.integers(0, most, (LANES, *shape))


CASES: dict[str, tuple[str, list[Any], tuple[int, ...]]] = {
    "mask of fewer dimensions": ("aten.masked_fill.Scalar", [floats(2, 4), integers(2, 4).astype(bool), 2.0], (2, 4)),
    "mask of as many": ("aten.where.self", [integers(2, 2, 4).astype(bool), floats(2, 4), floats(2, 4)], (2, 4)),
    "gather": ("aten.gather.default", [floats(2, 4), -1, integers(4, 2, 3)], (2, 3)),
    "gather along the first": ("aten.gather.default", [floats(3, 4), 0, integers(3, 2, 4)], (2, 4)),
    "scatter": ("aten.scatter.value", [floats(2, 4), 1, integers(4, 2, 1), 1.0], (2, 4)),
    "sum of what goes to one place": ("aten.scatter_add.default", [floats(2, 4), 1, integers(4, 2, 5), floats(2, 5)], (2, 4)),
    "table": ("aten.embedding.default", [floats(5, 3), integers(5, 2, 4)], (2, 4, 3)),
    "gradient of a table": ("aten.embedding_dense_backward.default", [floats(2, 4, 3), integers(5, 2, 4), 5, -1, False], (5, 3)),
}


def given(value: Any, lane: int | None = None) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    part = value if lane is None else value[lane]
    return Floats(part) if part.dtype == np.float64 else part


@pytest.mark.parametrize("case", CASES)
def test_a_rule_does_what_the_meaning_does_on_each_lane(case: str) -> None:
    op, args, size = CASES[case]
    means, rule, cx = meanings.find(op), batched.find(op), Context(F64())
    assert means is not None and rule is not None
    cx.sizes = [(LANES, *size)]
    together = rule(cx, means, [given(a) for a in args], {})
    cx.sizes = [size]
    for lane in range(LANES):
        np.testing.assert_allclose(together[lane], means(cx, *(given(a, lane) for a in args)))


def test_lanes_become_a_first_dimension_and_come_back() -> None:
    found = NUMBERS.standard_normal((4, 5, 2, 1, 3))  # two dimensions, three axes of lanes
    cut, lanes = [True, False, True], (2, 7, 3)
    first = batched.first(found, cut, lanes)
    assert first.shape == (6, 4, 5, 1, 1, 1)
    np.testing.assert_array_equal(first[1 * 3 + 2, :, :, 0, 0, 0], found[:, :, 1, 0, 2])
    np.testing.assert_array_equal(batched.last(first, cut, lanes), found)


def test_torch_does_integers_of_many_lanes_at_once_or_says_that_it_cannot() -> None:
    tokens = torch.arange(12).reshape(3, 4)
    node = Node("aten.lt.Scalar", args=[{"t": 0}, 5])
    together = called_many(node, [tokens], [True])
    assert together is not None and together[0] is not None
    for lane in range(3):
        (alone,) = called(node, [tokens[lane]])
        assert alone is not None
        np.testing.assert_array_equal(together[0][lane], alone)
    assert called_many(Node("aten.nonzero.default", args=[{"t": 0}]), [tokens], [True]) is None
