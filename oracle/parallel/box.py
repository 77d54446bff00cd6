"""Which elements of a logical tensor a rank holds: the argument that every random draw and every cut has in common.

A `Box` is the shape of the whole and, for each dimension, the list of global indices that the rank holds, as
`Layout.indices` gives them: so a shard may be uneven, interleaved, striped or empty. Who draws asks for `runs`:
stretches of the row-major order of the whole that are neighbours there and in the shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError
from proctor.oracle.plans.mesh import Cut, Index, Layout, Mesh, Shape

Longs = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Stretches of a shard, in the order of the shard.

    Args:
        starts: [N] row-major index in the whole.
        lengths: [N] elements.
        offsets: [N] row-major index in the shard.
    """

    starts: Longs
    lengths: Longs
    offsets: Longs

    def sorted(self) -> Runs:
        """The same, in the order of the whole."""
        order = np.argsort(self.starts, kind="stable")
        return Runs(self.starts[order], self.lengths[order], self.offsets[order])


class Box(NamedTuple):
    """A rank's part of a logical tensor.

    Args:
        shape: of the whole.
        indices: global indices of each dimension, in the order of the shard.
    """

    shape: Shape
    indices: tuple[Index, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls(tuple(shape), tuple(np.arange(n, dtype=np.int64) for n in shape))

    @classmethod
    def of(cls, shape: Sequence[int], layout: Layout, mesh: Mesh, coords: Mapping[str, int]) -> Box:
        """What the rank at `coords` holds of a tensor of `shape`.

        Raises:
            MappingError: the layout cuts a dimension that is not there, or cannot be cut so.
        """
        return cls(tuple(shape), tuple(layout.indices(shape, mesh, coords)))

    @classmethod
    def around(cls, local: Sequence[int], layout: Layout, mesh: Mesh, coords: Mapping[str, int]) -> Box:
        """What a shard of shape `local` is of a tensor that the layout cuts into equal parts.

        Raises:
            MappingError: the tensor would not be cut into parts of that shape.
        """
        shape = list(local)
        for dim, cuts in layout.by_dim(len(shape)).items():
            shape[dim] *= math.prod(mesh.size(cut.axis) for cut in cuts)
        box = cls.of(shape, layout, mesh, coords)
        if box.local != tuple(local):
            raise MappingError(f"a shard {list(local)} is not what the layout ({layout}) leaves of {shape}")
        return box

    @classmethod
    def folded(cls, local: Sequence[int], fold: tuple[int, ...], layout: Layout, mesh: Mesh, coords: Mapping[str, int]) -> Box:
        """As `around`, of a tensor one of whose dimensions is two in one; the layout is that of the tensor with both.

        Args:
            local: shape of the shard.
            fold: the dimension, and the size of the inner one of the two on one device; nothing for `around` itself.
            layout, mesh, coords: as for `around`.

        Raises:
            MappingError: as `around`, and where the dimension is no multiple of the inner one.
        """
        if not fold:
            return cls.around(local, layout, mesh, coords)
        dim, inner = fold
        parts = math.prod(mesh.size(cut.axis) for cut in layout.by_dim(len(local) + 1).get(dim + 1, ()))
        if dim >= len(local) or inner % parts or local[dim] % (inner // parts):
            raise MappingError(f"dimension {dim} of a shard {list(local)} is not so many times {inner} over {parts} ranks")
        both = cls.around((*local[:dim], local[dim] * parts // inner, inner // parts, *local[dim + 1 :]), layout, mesh, coords)
        outer, within = both.indices[dim : dim + 2]
        joint = (outer[:, None] * inner + within[None, :]).reshape(-1)
        return cls((*both.shape[:dim], both.shape[dim] * inner, *both.shape[dim + 2 :]), (*both.indices[:dim], joint, *both.indices[dim + 2 :]))

    @property
    def local(self) -> Shape:
        """Shape of the shard."""
        return tuple(len(i) for i in self.indices)

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    def is_whole(self) -> bool:
        """Whether the shard is the whole, in its order."""
        return self.local == self.shape and all(bool((i[1:] > i[:-1]).all()) for i in self.indices)

    def permuted(self, order: Sequence[int]) -> Box:
        """With the dimensions in another order."""
        return Box(tuple(self.shape[d] for d in order), tuple(self.indices[d] for d in order))

    def runs(self) -> Runs:
        """The stretches; none for an empty shard."""
        if 0 in self.local:
            return Runs(*(np.zeros(0, np.int64) for _ in range(3)))
        last = len(self.shape) - 1
        while last >= 0 and len(self.indices[last]) == self.shape[last] and bool((np.diff(self.indices[last]) == 1).all()):
            last -= 1
        inner = math.prod(self.shape[last + 1 :])
        if last < 0:
            return Runs(np.zeros(1, np.int64), np.array([inner]), np.zeros(1, np.int64))
        held = self.indices[last]
        edges = np.flatnonzero(np.diff(held) != 1) + 1
        first = np.concatenate([[0], edges])
        count = np.diff(np.concatenate([first, [len(held)]]))
        outer, width = np.zeros(1, np.int64), self.shape[last] * inner
        for dim in reversed(range(last)):
            outer = (self.indices[dim][:, None] * width + outer[None, :]).reshape(-1)
            width *= self.shape[dim]
        rows = np.arange(len(outer), dtype=np.int64)[:, None] * (len(held) * inner)
        return Runs(
            (outer[:, None] + held[first] * inner).reshape(-1),
            np.broadcast_to(count * inner, (len(outer), len(count))).reshape(-1),
            (rows + first * inner).reshape(-1),
        )


def placements(ndim: int, axes: Sequence[str]) -> list[Layout]:
    """Every way to lay a tensor on the axes by plain blocks: each axis replicates or cuts one dimension."""
    found: list[tuple[Cut, ...]] = [()]
    for axis in axes:
        found = [cuts + more for cuts in found for more in ((), *((Cut(axis, "chunk", d),) for d in range(ndim)))]
    return [Layout(cuts) for cuts in found]
