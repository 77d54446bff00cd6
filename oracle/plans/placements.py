"""Layouts read off the program: DTensor placements (FSDP2 and tensor parallelism included) and Megatron's attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Cut, Layout, Mesh, Shape
from proctor.oracle.tensors import Placement

# As `str` and `repr` of torch's placements write them, 2.3 to 2.13.
_SHARD: Final = re.compile(r"(?:S|Shard)\((?:dim=)?(-?\d{1,3})\)")
_STRIDED: Final = re.compile(r"(?:_S|_StridedShard|S)\((?:dim=)?(-?\d{1,3}), ?(?:sf=|split_factor=)?(\d{1,9})\)")
_PARTIAL: Final = re.compile(r"(?:P|Partial|_Partial)(?:\((?:reduce_op=)?'?(\w*)'?\))?")
_REPLICATE: Final = re.compile(r"R|Replicate\(\)")
_REDUCTIONS: Final = {
    "": "partial", "sum": "partial", "avg": "partial-avg", "mean": "partial-avg", "max": "partial-max", "min": "partial-min",
}  # fmt: skip


def from_dtensor(placement: Mapping[str, Any]) -> tuple[Mesh, Layout, Shape]:
    """The mesh, the layout and the whole shape of a DTensor.

    Args:
        placement: {"axes": […], "sizes": […], "placements": ["S(0)", "R", "P(sum)"], "shape": […]}; axes without
            names may be "" and are then called mesh_0, mesh_1, ….

    Raises:
        OracleError: it is not of that form, or a placement is of an unknown kind.
    """
    try:
        said = msgspec.convert(placement, Placement)
    except msgspec.ValidationError as error:
        raise OracleError(f"{str(placement)[:120]} is not a DTensor's placement: {error}") from None
    mesh = Mesh(tuple(a or f"mesh_{i}" for i, a in enumerate(said.axes)), said.sizes)
    return mesh, layout_of(mesh, said.placements), said.shape


def layout_of(mesh: Mesh, placements: Sequence[str]) -> Layout:
    """The layout of placements, one per mesh axis.

    `_StridedShard(dim, split_factor=n)` says that axes further right, of n ranks together, have cut the dimension
    before this one (FSDP2 over tensor parallelism): it becomes an inner cut of them, which is right for uneven
    shards too. Where the factor does not fit it is n interleaved groups.

    Raises:
        OracleError: a placement is of an unknown kind.
    """
    if len(placements) != len(mesh.axes):
        raise OracleError(f"{len(placements)} placements for a mesh of {len(mesh.axes)} axes ({mesh})")
    order: dict[int, list[Cut]] = {}
    summed: list[Cut] = []
    for axis, text in reversed(list(zip(mesh.axes, placements))):
        text = text.strip()
        if match := _SHARD.fullmatch(text):
            order.setdefault(int(match[1]), []).insert(0, Cut(axis, "chunk", int(match[1])))
        elif match := _STRIDED.fullmatch(text):
            dim, factor, before = int(match[1]), int(match[2]), 1
            cuts = order.setdefault(dim, [])
            at = 0
            while before < factor and at < len(cuts) and cuts[at].strategy == "chunk":
                before *= mesh.size(cuts[at].axis)
                at += 1
            if before == factor:
                cuts.insert(at, Cut(axis, "chunk", dim))
            else:
                cuts.insert(0, Cut(axis, "interleaved", dim, (factor,)))
        elif (match := _PARTIAL.fullmatch(text)) and (match[1] or "") in _REDUCTIONS:
            summed.insert(0, Cut(axis, _REDUCTIONS[match[1] or ""]))
        elif not _REPLICATE.fullmatch(text):
            raise OracleError(
                f"placement {text[:60]!r} along {axis} is not one that the oracle can undo",
                hint="give the layout in the plan",
            )
    return Layout((*(cut for cuts in order.values() for cut in cuts), *summed))


def from_megatron(parallel: bool, dim: int, stride: int = 1, *, axis: str = "tp") -> Layout:
    """The layout of a parameter by Megatron's attributes.

    Args:
        parallel: `tensor_model_parallel`.
        dim: `partition_dim`; −1 when the parameter is not cut.
        stride: `partition_stride`: groups of which every rank holds a block.
        axis: the mesh axis of tensor parallelism.
    """
    if not parallel or dim < 0:
        return Layout()
    return Layout((Cut(axis, "chunk", dim) if stride <= 1 else Cut(axis, "interleaved", dim, (stride,)),))
