"""From the shards of all ranks to one logical tensor: nothing missing, nothing twice, replicas equal bit for bit.

A *part* is what one position on the axes that cut or sum the tensor holds. Shards of one part are replicas: they are
compared by their raw bits, and where they differ a `Conflict` names the mesh axes along which they do (those over
which a collective is missing) and the ranks that are unlike the others. Whether a difference of replicas is within
rounding is for the caller, who gets its size. Source: TTrace §4.1 and §4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError
from proctor.oracle._extents import place, whole
from proctor.oracle._replicas import Conflict, Shard, agree, conflicts_of, difference, same_bits
from proctor.oracle.dtypes import as_float, from_float
from proctor.oracle.mesh import Index, Layout, Mesh, Shape, positions

Array = npt.NDArray[Any]

# Blocks that are copied one by one; a finer pattern (a stride) is scattered through an index array instead.
_MOST_BLOCKS: Final = 256


class Merged(NamedTuple):
    """A logical tensor.

    Args:
        full: the values, in the dtype in which the shards are stored; 0 where there is a hole.
        conflicts: replicas that differ.
        holes: parts that no rank holds, in words (only with `strict=False`).
        overlaps: elements that several parts hold, in words (only with `strict=False`).
        absent: axis → coordinates at which no rank has the tensor, e.g. pipeline stages without the layer.
        layout: the layout that was used, with the sizes that "uneven" left open.
    """

    full: Array
    conflicts: list[Conflict]
    holes: list[str]
    overlaps: list[str]
    absent: dict[str, tuple[int, ...]]
    layout: Layout


def merge(
    shards: Sequence[Shard], layout: Layout, mesh: Mesh, full_shape: Sequence[int] | None = None, *, strict: bool = True
) -> Merged:
    """Puts shards together.

    Args:
        shards: one per rank that has the tensor, in any order.
        layout: of the tensor; axes that the mesh lacks count as of size 1.
        mesh: of the candidate.
        full_shape: of the whole tensor where it is known (the reference's).
        strict: raise when a part is missing or held twice; otherwise say so in the result.

    Raises:
        MappingError: the shards do not make up one tensor of that layout.
    """
    layout = layout.on(mesh)
    by_rank = {shard.rank: shard for shard in shards}
    if len(by_rank) < len(shards):
        raise MappingError("a rank gave two shards of one tensor")
    if len({(s.dtype or s.array.dtype.name) for s in shards}) > 1:
        seen = ", ".join(sorted({s.dtype or s.array.dtype.name for s in shards}))
        raise MappingError(f"ranks hold one tensor in different dtypes: {seen}")
    absent, missing = _missing(shards, layout, mesh)
    holes = [f"{place(at)} (rank {mesh.rank(at)} of the mesh)" for at in missing]
    if holes and strict:
        raise MappingError(f"a shard is missing: nothing from {', '.join(holes[:4])}{_more(holes)}")
    shape, layout = _shape(shards, layout, mesh, full_shape, open_ok=bool(holes))
    cut_axes = [cut.axis for cut in layout.cuts if not cut.reduction]
    sum_axes = [cut.axis for cut in layout.cuts if cut.reduction]
    parts: dict[tuple[int, ...], list[Shard]] = {}
    for shard in shards:
        at = tuple(mesh.index(axis, shard.coords) for axis in cut_axes + sum_axes)
        parts.setdefault(at, []).append(shard)
    overlaps = _coverage(layout, mesh, shape, strict=strict)
    conflicts = conflicts_of(list(parts.values()))
    addends: dict[tuple[int, ...], list[Array]] = {}
    coords: dict[tuple[int, ...], Mapping[str, int]] = {}
    for at in sorted(parts):
        addends.setdefault(at[: len(cut_axes)], []).append(agree(parts[at]).array)
        coords.setdefault(at[: len(cut_axes)], parts[at][0].coords)
    first = shards[0]
    pieces = {at: reduced(found, layout, first.dtype) for at, found in addends.items()}
    if len(pieces) == 1 and not cut_axes:
        full = next(iter(pieces.values()))
    else:
        full = np.zeros(shape, first.array.dtype)
        for at, piece in pieces.items():
            _put(full, layout.indices(shape, mesh, coords[at]), piece)
    if layout.padded and full_shape is not None:
        full = full[tuple(slice(0, extent) for extent in full_shape)]
    return Merged(full, conflicts, holes, overlaps, absent, layout)


class Span(NamedTuple):
    """A flat range of one parameter, as ZeRO deals them out; `start` and `stop` in elements."""

    start: int
    stop: int
    array: Array
    rank: int = -1
    dtype: str = ""


def merge_spans(spans: Sequence[Span], numel: int, *, axis: str = "dp", strict: bool = True) -> Merged:
    """Puts the flat ranges of one (local) parameter together; equal ranges are replicas.

    Args:
        spans: of all ranks that share the parameter, in any order; empty ones are allowed.
        numel: of the parameter.
        axis: over which the ranges are dealt out, for the messages.
        strict: raise when a range is missing or held twice.

    Raises:
        MappingError: a range is outside, of another length than its array, missing, or overlaps another.
    """
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for start, stop, array, rank, dtype in (Span(*s) for s in spans):
        if not 0 <= start <= stop <= numel or array.size != stop - start:
            raise MappingError(f"rank {rank} holds elements {start}:{stop} ({array.size} values) of a parameter of {numel}")
        if start < stop:
            ranges.setdefault((start, stop), []).append(Shard(rank, {axis: rank}, array.reshape(-1), dtype))
    if not ranges and numel:
        raise MappingError(f"elements 0:{numel} are missing: no rank along {axis} has them")
    kind = next(iter(ranges.values()))[0].array.dtype if ranges else np.dtype(np.float32)
    full, end, holes, overlaps = np.zeros(numel, kind), 0, [], []
    for start, stop in sorted(ranges):
        if start > end:
            holes.append(f"{end}:{start}")
        if start < end:
            overlaps.append(f"{start}:{min(end, stop)}")
        end = max(end, stop)
        full[start:stop] = agree(ranges[start, stop]).array
    if end < numel:
        holes.append(f"{end}:{numel}")
    if strict and (holes or overlaps):
        said = f"elements {', '.join(holes[:4])} are missing" if holes else f"elements {', '.join(overlaps[:4])} are held twice"
        raise MappingError(f"flat shards along {axis} do not make up a parameter of {numel} elements: {said}")
    return Merged(full, conflicts_of(list(ranges.values())), holes, overlaps, {}, Layout())


def _missing(
    shards: Sequence[Shard], layout: Layout, mesh: Mesh
) -> tuple[dict[str, tuple[int, ...]], list[dict[str, int]]]:
    """Coordinates without the tensor by axis, and positions that should have it because their neighbours do."""
    bound = {name for cut in layout.cuts for name in mesh.members(cut.axis)}
    seen: dict[str, set[int]] = {axis: set() for axis in mesh.axes}
    for shard in shards:
        for axis in mesh.axes:
            at = shard.coords.get(axis, 0)
            if not 0 <= at < mesh.size(axis):
                raise MappingError(f"rank {shard.rank} is at {axis}={at}, which is not on the mesh ({mesh})")
            seen[axis].add(at)
    absent = {
        axis: tuple(at for at in range(mesh.size(axis)) if at not in found)
        for axis, found in seen.items()
        if axis not in bound and len(found) < mesh.size(axis)
    }
    have = {tuple(shard.coords.get(axis, 0) for axis in mesh.axes) for shard in shards}
    expected = (
        at
        for at in positions(mesh.axes, mesh)
        if all(axis in bound or here in seen[axis] for axis, here in zip(mesh.axes, at))
    )
    return absent, [dict(zip(mesh.axes, at)) for at in expected if at not in have]


def _shape(
    shards: Sequence[Shard], layout: Layout, mesh: Mesh, full_shape: Sequence[int] | None, *, open_ok: bool
) -> tuple[Shape, Layout]:
    held = {shard.rank: (shard.array.shape, shard.coords) for shard in shards}
    if full_shape is None:
        return whole(layout, held, mesh)
    said = tuple(full_shape)
    try:
        shape, sized = whole(layout, held, mesh)
    except MappingError:
        if not open_ok or any(c.strategy == "uneven" and not c.options for c in layout.cuts):
            raise
        if any(layout.local_shape(said, mesh, coords) != local for local, coords in held.values()):
            raise
        return said, layout
    longer = len(shape) == len(said) and all(here >= there for here, there in zip(shape, said))
    if shape != said and not (layout.padded and longer):
        cut = any(not c.reduction for c in layout.cuts)
        alike = cut and all(local == said for local, _ in held.values())
        raise MappingError(
            f"the shards make up {list(shape)}, but the whole tensor is {list(said)}",
            hint="every rank holds the whole tensor: the plan cuts it, the program does not" if alike
            else "padded = true in the plan, if the end is padding" if longer else "",
        )
    return shape, sized


def _coverage(layout: Layout, mesh: Mesh, shape: Shape, *, strict: bool) -> list[str]:
    """Elements that a strategy gives to several parts, or to none: that is an error of the strategy.

    Dimensions are cut by different axes, hence what every dimension covers once, the tensor covers once.
    """
    found = []
    for dim, cuts in layout.by_dim(len(shape)).items():
        count = np.zeros(shape[dim], np.int64)
        axes = [cut.axis for cut in cuts]
        for at in positions(axes, mesh):
            coords = {name: here for axis, index in zip(axes, at) for name, here in _split(axis, index, mesh)}
            np.add.at(count, layout.along(shape[dim], cuts, mesh, coords), 1)
        if count.size and (count.min() < 1 or count.max() > 1):
            lost, twice = np.flatnonzero(count == 0), np.flatnonzero(count > 1)
            said = f"dimension {dim}: " + "; ".join(
                f"{len(which)} of {shape[dim]} elements are {what}, the first is {which[0]}"
                for which, what in ((lost, "held by no rank"), (twice, "held twice"))
                if len(which)
            )
            if strict:
                raise MappingError(f"the layout ({layout}) does not cover the tensor once: {said}")
            found.append(said)
    return found


def _split(axis: str, index: int, mesh: Mesh) -> list[tuple[str, int]]:
    """Coordinates on the members of a joint axis."""
    found = []
    for name in reversed(mesh.members(axis)):
        index, here = divmod(index, mesh.size(name))
        found.append((name, here))
    return found


def reduced(addends: Sequence[Array], layout: Layout, dtype: str) -> Array:
    """The value of which these are the addends, computed in float64 and rounded once."""
    kinds = {cut.reduction for cut in layout.cuts if cut.reduction}
    if len(addends) == 1:
        return addends[0]
    if len(kinds) > 1:
        raise MappingError(f"the layout ({layout}) combines in two ways, which this cannot undo")
    kind = next(iter(kinds))
    dtype = dtype or addends[0].dtype.name
    total = as_float(addends[0], dtype).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for addend in addends[1:]:
            value = as_float(addend, dtype)
            if kind in ("sum", "avg"):
                total += value
            else:
                (np.maximum if kind == "max" else np.minimum)(total, value, out=total)
        if kind == "avg":
            total /= len(addends)
    return from_float(total, dtype).reshape(addends[0].shape)


def _put(full: Array, where: list[Index], piece: Array) -> None:
    """full[where] = piece, block by block where the indices are runs."""
    runs = [_runs(index, extent) for index, extent in zip(where, full.shape)]
    if any(index.size == 0 for index in where):
        return
    blocks = int(np.prod([len(r) for r in runs], dtype=np.int64)) if runs else 1
    if blocks > _MOST_BLOCKS:
        full[np.ix_(*where)] = piece
        return
    for at in np.ndindex(*(len(r) for r in runs)):
        chosen = [runs[d][i] for d, i in enumerate(at)]
        full[tuple(c[0] for c in chosen)] = piece[tuple(c[1] for c in chosen)]


def _runs(index: Index, extent: int) -> list[tuple[slice, slice]]:
    """Runs of consecutive indices: (where in the whole, where in the piece)."""
    if len(index) == extent and (extent == 0 or (index[0] == 0 and bool(np.all(np.diff(index) == 1)))):
        return [(slice(None), slice(None))]
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts = np.concatenate(([0], breaks)) if len(index) else np.empty(0, np.int64)
    stops = np.concatenate((breaks, [len(index)]))
    return [(slice(int(index[a]), int(index[b - 1]) + 1), slice(int(a), int(b))) for a, b in zip(starts, stops)]


def _more(found: Sequence[object]) -> str:
    return f" (and {len(found) - 4} more)" if len(found) > 4 else ""


__all__ = ["Conflict", "Merged", "Shard", "Span", "difference", "merge", "merge_spans", "same_bits"]
