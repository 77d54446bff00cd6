from __future__ import annotations

import itertools
from typing import Any

import pytest

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.placements import from_dtensor, from_megatron, layout_of

MESH = Mesh.parse("dp=2,tp=2")


def record(*placements: str, **change: Any) -> dict[str, Any]:
    return {"axes": ["dp", "tp"], "sizes": [2, 2], "placements": list(placements), "shape": [8, 8], **change}


@pytest.mark.parametrize(
    ("placements", "layout"),
    [
        (("S(0)", "R"), Layout((Cut("dp"),))),
        (("Shard(dim=0)", "Replicate()"), Layout((Cut("dp"),))),
        (("S(0)", "S(0)"), Layout((Cut("dp"), Cut("tp")))),
        (("R", "S(1)"), Layout((Cut("tp", "chunk", 1),))),
        (("P(sum)", "S(1)"), Layout((Cut("tp", "chunk", 1), Cut("dp", "partial")))),
        (("Partial(avg)", "R"), Layout((Cut("dp", "partial-avg"),))),
        (("P", "R"), Layout((Cut("dp", "partial"),))),
        (("_S(0, 2)", "S(0)"), Layout((Cut("tp"), Cut("dp")))),
        (("_StridedShard(dim=0, sf=2)", "Shard(dim=0)"), Layout((Cut("tp"), Cut("dp")))),
        (("S(0)", "_S(0, 2)"), Layout((Cut("dp"), Cut("tp", "interleaved", 0, (2,))))),
        (("_S(0, 1)", "S(0)"), Layout((Cut("dp"), Cut("tp")))),
    ],
)
def test_placements_as_torch_writes_them(placements: tuple[str, ...], layout: Layout) -> None:
    mesh, found, shape = from_dtensor(record(*placements))
    assert (mesh, found, shape) == (MESH, layout, (8, 8))


def test_fsdp_over_tensor_parallelism_cuts_from_right_to_left() -> None:
    layout = layout_of(MESH, ["_S(0, 2)", "S(0)"])
    assert [layout.indices((8,), MESH, MESH.coords(r))[0].tolist() for r in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    # Uneven, as FSDP2 lays a column-parallel linear layer of 7 outputs out.
    assert [layout.indices((7,), MESH, MESH.coords(r))[0].tolist() for r in range(4)] == [[0, 1], [4, 5], [2, 3], [6]]


@pytest.mark.parametrize("texts", list(itertools.product(["S(0)", "R", "_S(0, 2)"], ["S(0)", "S(1)", "_S(0, 2)"])))
def test_the_same_parts_as_torch_computes(texts: tuple[str, str]) -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    types = pytest.importorskip("torch.distributed.tensor.placement_types")
    compute = getattr(utils, "_compute_local_shape_and_global_offset", None)
    if compute is None or not hasattr(types, "_StridedShard"):
        pytest.skip("this torch computes it elsewhere")
    if any("_S" in t for t in texts) and texts != ("_S(0, 2)", "S(0)") and "local_shard_size_and_offset" not in vars(types._StridedShard):
        pytest.skip("this torch knows a strided shard only where a shard of the same dimension follows")
    made = {"S(0)": types.Shard(0), "S(1)": types.Shard(1), "R": types.Replicate(), "_S(0, 2)": types._StridedShard(0, split_factor=2)}
    layout = layout_of(MESH, [str(made[t]) for t in texts])
    assert layout == layout_of(MESH, [repr(made[t]) for t in texts])
    for rank in range(4):
        at = MESH.coords(rank)
        local, offset = compute((16, 8), (2, 2), [at["dp"], at["tp"]], [made[t] for t in texts])
        held = layout.indices((16, 8), MESH, at)
        assert tuple(map(len, held)) == tuple(local)
        assert tuple(int(h[0]) for h in held) == tuple(offset)


@pytest.mark.parametrize(
    "wrong",
    [
        record("MaskP", "R"),
        record("S(0)"),
        record("S(0)", "R", sizes=[2, 0]),
        record("S(0)", "R", axes=["dp", "dp"]),
        record("S(0)", "R", shape=None),
        record("S(0)", 1),
        {},
    ],
)
def test_what_is_no_placement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OracleError):
        from_dtensor(wrong)


def test_axes_without_names_get_some() -> None:
    assert from_dtensor(record("R", "R", axes=["", ""]))[0].axes == ("mesh_0", "mesh_1")


def test_megatron_attributes() -> None:
    assert from_megatron(False, -1, 1) == from_megatron(True, -1) == Layout()
    assert from_megatron(True, 1, 1) == Layout((Cut("tp", "chunk", 1),))
    assert from_megatron(True, 0, 2, axis="etp") == Layout((Cut("etp", "interleaved", 0, (2,)),))
