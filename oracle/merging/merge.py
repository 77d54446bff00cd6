"""From the shards of all ranks to one logical tensor: nothing missing, nothing twice, replicas equal bit for bit.

A *part* is what ranks at one place of the tensor hold. Shards of one part are replicas, or addends of it; replicas are
compared by their raw bits, and where they differ a `Conflict` names the mesh axes along which they do (those over
which a collective is missing) and the ranks that are unlike the others. Whether a difference of replicas is within
rounding is for the caller, who gets its size. Source: TTrace §4.1 and §4.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError
from proctor.oracle.merging.locate import Index
from proctor.oracle.merging.replicas import Conflict, Shard, agree, conflicts_of
from proctor.oracle.numbers.dtypes import as_float, from_float
from proctor.oracle.plans.mesh import Layout, Mesh

Array = npt.NDArray[Any]

# Blocks that are copied one by one; a finer pattern (a stride) is scattered through an index array instead.
_MOST_BLOCKS: Final = 256


class Held(NamedTuple):
    """A shard and where it lies.

    Args:
        shard: what a rank holds.
        places: global indices along each dimension, as long as the shard.
        addend: which part of a sum it is, where the layout has partial axes.
        layout: how addends are combined.
    """

    shard: Shard
    places: Index
    addend: tuple[int, ...] = ()
    layout: Layout = Layout()


def where(layout: Layout, mesh: Mesh, coords: Mapping[str, int], shape: Sequence[int]) -> tuple[Index, tuple[int, ...]]:
    """What of a tensor the rank at some coordinates holds: its places, and which addend of them.

    Raises:
        MappingError: the layout cannot cut a tensor of that shape.
    """
    addend = tuple(mesh.index(cut.axis, coords) for cut in layout.cuts if cut.reduction)
    return tuple(layout.indices(shape, mesh, coords)), addend


def parts(held: Sequence[Held]) -> list[list[Held]]:
    """Shards of the same place together."""
    found: dict[tuple[bytes, ...], list[Held]] = {}
    for one in held:
        found.setdefault(tuple(index.tobytes() for index in one.places), []).append(one)
    return list(found.values())


def join(held: Sequence[Held], shape: Sequence[int]) -> tuple[Array | None, list[Conflict]]:
    """Put shards together.

    Args:
        held: one or more, in any order, all of one dtype.
        shape: of the whole.

    Returns:
        the whole in the dtype of the shards (of replicas what most ranks hold), or `None` where an element is held by no
        part or by several; and the replicas that differ.

    Raises:
        MappingError: the layout combines addends in several ways.
    """
    replicas: list[list[Shard]] = []
    whole = Whole(shape, held[0].shard.array.dtype)
    for part in parts(held):
        addends: dict[tuple[int, ...], list[Shard]] = {}
        for one in part:
            addends.setdefault(one.addend, []).append(one.shard)
        replicas += addends.values()
        whole.put(part[0].places, reduced([agree(same).array for same in addends.values()], part[0].layout, held[0].shard.dtype))
    return whole.values if whole.complete() else None, conflicts_of(replicas)


class Whole:
    """A tensor that is filled part by part, zeros at first."""

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.values: Array = np.zeros(tuple(shape), dtype)
        self._filled: list[Index] = []

    def put(self, places: Index, values: Array) -> None:
        """Values of a part."""
        self._filled.append(places)
        for there, here in _blocks(places, self.values.shape):
            self.values[there] = values[here]

    def complete(self) -> bool:
        """Whether every element belongs to one part, no more and no fewer."""
        if sum(math.prod(map(len, places)) for places in self._filled) != self.values.size:
            return False
        if len(self._filled) == 1:
            return True
        count = np.zeros(self.values.shape, np.uint8)
        for places in self._filled:
            for there, _ in _blocks(places, count.shape):
                count[there] += 1
        return bool(count.all())


def reduced(addends: Sequence[Array], layout: Layout, dtype: str) -> Array:
    """The value of which these are the addends, computed in float64 and rounded once.

    Raises:
        MappingError: the layout combines them in several ways.
    """
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


def _blocks(places: Index, shape: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Which elements of a whole are which of its part, block by block where the indices are runs."""
    if any(index.size == 0 for index in places):
        return
    runs = [_runs(index, extent) for index, extent in zip(places, shape, strict=True)]
    if math.prod(map(len, runs)) > _MOST_BLOCKS:
        yield np.ix_(*places), ...
        return
    for chosen in itertools.product(*runs):
        yield tuple(there for there, _ in chosen), tuple(here for _, here in chosen)


def _runs(index: npt.NDArray[np.int64], extent: int) -> list[tuple[slice, slice]]:
    """Runs of consecutive indices: (where in the whole, where in the part)."""
    if len(index) == extent and index[0] == 0 and bool(np.all(np.diff(index) == 1)):
        return [(slice(None), slice(None))]
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts, stops = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(index)]))
    return [(slice(int(index[a]), int(index[b - 1]) + 1), slice(int(a), int(b))) for a, b in zip(starts, stops)]
