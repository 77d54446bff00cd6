from __future__ import annotations

import numpy as np
import pytest

from proctor.errors import MappingError, OracleError
from proctor.oracle.plans.mesh import Cut, Layout, Mesh


def test_ranks_count_along_the_fastest_axis_first() -> None:
    mesh = Mesh(("pp", "dp", "tp"), (2, 3, 2))
    assert mesh.world == 12
    assert mesh.coords(0) == {"pp": 0, "dp": 0, "tp": 0}
    assert mesh.coords(7) == {"pp": 1, "dp": 0, "tp": 1}
    assert [mesh.rank(mesh.coords(r)) for r in range(12)] == list(range(12))
    assert mesh.rank({"dp": 2}) == 4


def test_mesh_is_read_from_text() -> None:
    assert Mesh.parse("dp=2, tp=4") == Mesh(("dp", "tp"), (2, 4))
    assert Mesh.parse("") == Mesh()
    assert Mesh().world == 1 and Mesh().coords(0) == {}
    assert str(Mesh.parse("dp=2,tp=4")) == "dp=2,tp=4"


@pytest.mark.parametrize("text", ["dp", "dp=x", "dp=0", "dp=2,dp=2", "d p=2", "=2", "dp=-1", "dp=99999999,tp=99999999", "dp=2=3"])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OracleError):
        Mesh.parse(text)


def test_joint_axes_count_as_one() -> None:
    mesh = Mesh.parse("dp=2,cp=3,tp=2")
    assert mesh.size("dp+cp") == 6
    assert mesh.index("dp+cp", {"dp": 1, "cp": 2}) == 5
    with pytest.raises(OracleError, match="no axis 'ep'"):
        mesh.size("dp+ep")
    layout = Layout((Cut("dp+cp", "chunk", 0),))
    assert layout.indices((7,), mesh, {"dp": 1, "cp": 0})[0].tolist() == [6]


def test_positions_off_the_mesh_are_refused() -> None:
    mesh = Mesh.parse("dp=2")
    for wrong in (2, -1):
        with pytest.raises(OracleError):
            mesh.coords(wrong)
    with pytest.raises(OracleError):
        mesh.rank({"dp": 2})


@pytest.mark.parametrize(
    ("spec", "cut"),
    [
        (0, Cut("tp", "chunk", 0)),
        (-1, Cut("tp", "chunk", -1)),
        ("1", Cut("tp", "chunk", 1)),
        ("interleaved:0:3", Cut("tp", "interleaved", 0, (3,))),
        ("interleaved:-1:[8,4,4]", Cut("tp", "interleaved", -1, (8, 4, 4))),
        ("interleaved:0:8:4:4", Cut("tp", "interleaved", 0, (8, 4, 4))),
        ("striped:1", Cut("tp", "striped", 1)),
        ("uneven:0:[3, 5]", Cut("tp", "uneven", 0, (3, 5))),
        ("partial", Cut("tp", "partial")),
        ("partial-avg", Cut("tp", "partial-avg")),
    ],
)
def test_cuts_as_plans_write_them(spec: object, cut: Cut) -> None:
    assert Cut.parse("tp", spec) == cut
    text = str(cut).partition(":")[2]
    assert Cut.parse("tp", text) == cut


@pytest.mark.parametrize("spec", [True, None, 1.5, "wrong:0", "chunk", "chunk:x", "interleaved:0:x", [], "", "partial-product", "chunk:0:" + "1" * 99])
def test_cuts_that_are_none_are_refused(spec: object) -> None:
    with pytest.raises(OracleError, match="axis 'tp'"):
        Cut.parse("tp", spec)


def test_cuts_of_one_dimension_nest_as_listed() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    outer_dp, outer_tp = Layout((Cut("dp"), Cut("tp"))), Layout((Cut("tp"), Cut("dp")))
    assert [outer_dp.indices((8,), mesh, mesh.coords(r))[0].tolist() for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [outer_tp.indices((8,), mesh, mesh.coords(r))[0].tolist() for r in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert outer_tp.sorted(mesh) == outer_dp
    assert outer_tp.on(Mesh.parse("tp=2")) == Layout((Cut("tp"),))


@pytest.mark.parametrize(
    ("cut", "said"),
    [(Cut("tp", "chunk", 2), "dimension 2 of a tensor of 1"), (Cut("tp", "uneven", 0, (1, 2)), "does not divide 2")],
)
def test_a_shape_that_the_layout_cannot_cut_is_told(cut: Cut, said: str) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    with pytest.raises(MappingError, match=said):
        Layout((cut,)).indices((2,), mesh, mesh.coords(0))


def test_an_axis_cuts_a_tensor_once() -> None:
    with pytest.raises(OracleError, match="'tp' is named twice"):
        Layout((Cut("tp"), Cut("dp+tp", "chunk", 1)))


def test_gradients_of_addends_are_whole() -> None:
    assert Layout((Cut("tp", "partial"), Cut("dp"))).gradient() == Layout((Cut("dp"),))


def test_a_rank_holds_whole_dimensions_that_are_not_cut() -> None:
    held = Layout((Cut("tp", "chunk", 1),)).indices((2, 4), Mesh.parse("tp=2"), {"tp": 1})
    assert [h.tolist() for h in held] == [[0, 1], [2, 3]]
    assert Layout().indices((), Mesh(), {}) == []
    assert np.array_equal(np.arange(8).reshape(2, 4)[np.ix_(*held)], [[2, 3], [6, 7]])
