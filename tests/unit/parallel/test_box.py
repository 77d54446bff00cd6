"""A box names the same elements as indexing the whole does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.errors import MappingError
from proctor.oracle.parallel.box import Box, placements
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

MESH = Mesh(("a", "b"), (2, 3))
CUTS = ("chunk", "balanced", "striped", "interleaved")


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=4)))
    cuts = []
    for axis in MESH.axes:
        if draw(st.booleans()):
            kind = draw(st.sampled_from(CUTS))
            cuts.append(Cut(axis, kind, draw(st.integers(0, len(shape) - 1)), (2,) if kind == "interleaved" else ()))
    return Box.of(shape, Layout(tuple(cuts)), MESH, MESH.coords(draw(st.integers(0, 5))))


@given(boxes())
@settings(deadline=None)
def test_runs_name_the_elements_of_the_shard_in_its_order(box):
    whole = np.arange(box.size).reshape(box.shape)
    shard = whole[np.ix_(*box.indices)].reshape(-1)
    found = np.full(shard.size, -1)
    for start, length, offset in zip(*(c.tolist() for c in box.runs())):
        found[offset : offset + length] = np.arange(start, start + length)
    assert np.array_equal(found, shard)


def test_a_whole_tensor_is_one_run():
    assert [c.tolist() for c in Box.whole((3, 4, 5)).runs()] == [[0], [60], [0]]
    assert [c.tolist() for c in Box.whole(()).runs()] == [[0], [1], [0]]


def test_a_shard_that_the_layout_cannot_leave_is_refused():
    with pytest.raises(MappingError, match="is not what the layout"):
        Box.around((3, 2), Layout((Cut("b", "interleaved", 1, (4,)),)), MESH, {"b": 1})


def test_placements_are_all_of_them():
    assert len(placements(2, ("a", "b"))) == 9


def test_a_dimension_that_is_rows_times_heads_is_cut_along_both():
    mesh, layout = Mesh(("dp", "tp"), (2, 2)), Layout((Cut("dp", dim=0), Cut("tp", dim=1)))
    whole = np.arange(4 * 6).reshape(4, 6)  # rows x heads
    for dp in range(2):
        for tp in range(2):
            box = Box.folded((6, 5), (0, 6), layout, mesh, {"dp": dp, "tp": tp})
            assert box.shape == (24, 5) and box.local == (6, 5)
            assert box.indices[0].tolist() == whole[2 * dp : 2 * dp + 2, 3 * tp : 3 * tp + 3].reshape(-1).tolist()
    with pytest.raises(MappingError, match="not so many times 4 over 2 ranks"):
        Box.folded((7, 5), (0, 4), layout, mesh, {"dp": 0, "tp": 0})
