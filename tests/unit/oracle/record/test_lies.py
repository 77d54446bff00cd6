"""How a drawn tensor lies, from the tensors around it."""

from __future__ import annotations

import numpy as np
import pytest

from proctor.oracle.collect.lies import box_of
from proctor.oracle.store.draws import Extent, Lies


def extent(dim: int, whole: int, held: range | list[int]) -> Extent:
    return Extent(dim, whole, np.array(held, np.int64).tobytes())


# A block of attention on dp 2 x tp 2, of rank 3: rows in turn, features in blocks.
ATTENTION = Lies(extents={
    "0/layers.0.attention": [extent(0, 8, [1, 3, 5, 7])],
    "0/layers.0.attention.proj": [extent(0, 8, [1, 3, 5, 7]), extent(2, 32, range(16, 32))],
})  # fmt: skip
INSIDE = ["layers.0.attention", "layers.0", ""]


def test_rows_lie_as_rows_and_heads_as_the_features_do() -> None:
    box = box_of((4, 2, 16, 16), (8, 4, 16, 16), INSIDE, 0, ATTENTION)
    assert box is not None
    assert [i.tolist() for i in box.indices[:2]] == [[1, 3, 5, 7], [2, 3]]
    assert box.shape == (8, 4, 16, 16)


def test_a_step_of_which_nothing_is_known_is_as_the_first() -> None:
    box = box_of((4, 16, 32), (8, 16, 32), INSIDE, 5, ATTENTION)
    assert box is not None
    assert box.indices[0].tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("local", "whole", "lies"),
    [
        ((4, 16), (8, 16), None),  # nothing was found out
        ((4, 16), (8, 16, 1), ATTENTION),  # another tensor
        ((3, 2, 16, 16), (8, 4, 16, 16), ATTENTION),  # no such part
        ((8, 2, 4), (8, 4, 4), Lies(extents={"0/layers.0.attention": [extent(1, 16, range(8)), extent(2, 32, range(16, 32))]})),  # two blocks that differ
    ],
)
def test_what_is_not_clear_is_not_said(local: tuple[int, ...], whole: tuple[int, ...], lies: Lies | None) -> None:
    assert box_of(local, whole, INSIDE, 0, lies) is None


def test_the_whole_needs_nothing_known() -> None:
    box = box_of((8, 4), (8, 4), [""], 0, None)
    assert box is not None
    assert box.is_whole()
