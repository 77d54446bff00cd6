"""The shape of a whole tensor from the shapes of its shards, and what is wrong where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from proctor.errors import MappingError
from proctor.oracle.mesh import Cut, Layout, Mesh, Shape, positions

Held = Mapping[int, tuple[Shape, Mapping[str, int]]]


def place(coords: Mapping[str, int]) -> str:
    """ "dp=1 tp=0", for people."""
    return " ".join(f"{axis}={at}" for axis, at in coords.items()) or "one rank"


def whole(layout: Layout, held: Held, mesh: Mesh) -> tuple[Shape, Layout]:
    """Shape of the whole tensor and the layout with the sizes that "uneven" left open.

    Args:
        layout: of the tensor.
        held: rank → (shape of its shard, its coordinates).
        mesh: of the layout's axes.

    Raises:
        MappingError: no shards, shards missing, or shapes that do not follow from the layout.
    """
    if not held:
        raise MappingError("there are no shards to merge")
    if len({len(shape) for shape, _ in held.values()}) > 1:
        seen = ", ".join(f"rank {rank} {list(shape)}" for rank, (shape, _) in list(held.items())[:4])
        raise MappingError(f"shards have different numbers of dimensions: {seen}")
    ndim = len(next(iter(held.values()))[0])
    cuts = layout.by_dim(ndim)
    full: list[int] = []
    for dim in range(ndim):
        extents = _extents(dim, cuts.get(dim, []), held, mesh)
        for cut in cuts.get(dim, []):
            if cut.strategy == "uneven" and not cut.options:
                layout = _sized(layout, cut, cuts[dim], extents, mesh)
        full.append(sum(extents.values()))
    for rank, (shape, coords) in held.items():
        said = layout.local_shape(full, mesh, coords)
        if said != shape:
            dim = next(d for d in range(ndim) if said[d] != shape[d])
            raise MappingError(
                f"rank {rank} ({place(coords)}) holds {shape[dim]} along dimension {dim}, "
                f"but the layout ({layout}) gives it {said[dim]} of {full[dim]}",
                hint="name the strategy in the plan: uneven, balanced, interleaved, striped",
            )
    return tuple(full), layout


def _extents(dim: int, cuts: Sequence[Cut], held: Held, mesh: Mesh) -> dict[tuple[int, ...], int]:
    """Extent of the shards along one dimension by position on the axes that cut it; every position has one."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, (shape, coords) in held.items():
        key = tuple(mesh.index(cut.axis, coords) for cut in cuts)
        first, extent = found.setdefault(key, (rank, shape[dim]))
        if extent != shape[dim]:
            raise MappingError(
                f"ranks {first} and {rank} should hold the same part of dimension {dim}, "
                f"but one holds {extent} elements of it and the other {shape[dim]}",
                hint="an axis that cuts this dimension is not in the layout" if not cuts else "",
            )
    missing = [at for at in positions([cut.axis for cut in cuts], mesh) if at not in found]
    if missing:
        parts = "; ".join(place(dict(zip((cut.axis for cut in cuts), at))) for at in missing[:4])
        raise MappingError(f"the part of dimension {dim} at {parts} is missing: no rank there has the tensor")
    return {key: extent for key, (_, extent) in found.items()}


def _sized(layout: Layout, open_cut: Cut, cuts: Sequence[Cut], extents: Mapping[tuple[int, ...], int], mesh: Mesh) -> Layout:
    """The layout with the sizes of one "uneven" cut as the shards have them."""
    at = cuts.index(open_cut)
    outer: dict[tuple[int, ...], list[int]] = {}
    for key, extent in extents.items():
        sizes = outer.setdefault(key[:at], [0] * mesh.size(open_cut.axis))
        sizes[key[at]] += extent
    if len({tuple(sizes) for sizes in outer.values()}) > 1:
        raise MappingError(f"the sizes along {open_cut.axis} differ between the parts of {cuts[at - 1].axis}: {list(outer.values())[:4]}")
    sized = msgspec.structs.replace(open_cut, options=tuple(next(iter(outer.values()))))
    return Layout(tuple(sized if cut is open_cut else cut for cut in layout.cuts), layout.padded)
