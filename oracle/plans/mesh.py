"""The layout language: ranks on a mesh with named axes, and how one logical tensor lies on it.

Axes go slow → fast: of `Mesh(("dp", "tp"), (2, 2))` ranks 0 and 1 are neighbours along tp. Axes that a `Layout` does
not name replicate the tensor. Several cuts of one dimension nest in the order in which the layout lists them, the
first outermost; `Layout.sorted` puts them into the order of the mesh, slow → fast, which is what plans mean when they
do not say otherwise. Source: TTrace §4.1; `torch.distributed.tensor` placements say the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError, OracleError
from proctor.oracle.sharding import strategy

Index = npt.NDArray[np.int64]
Shape = tuple[int, ...]

_AXIS: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_SPEC: Final = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):\s*(-?\d{1,3})\s*((?::\s*(?:\d{1,12}|\[[\d,\s]*\])\s*)*)")
_MOST_RANKS: Final = 1 << 24
_MOST_OPTIONS: Final = 4096


class Mesh(msgspec.Struct, frozen=True):
    """Ranks in a grid.

    Args:
        axes: names, slow → fast.
        sizes: ranks along each; their product is the world.

    Raises:
        OracleError: an axis has no valid name, comes twice or has no positive size.
    """

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise OracleError(f"a mesh of {len(self.axes)} axes {list(self.axes)} has {len(self.sizes)} sizes {list(self.sizes)}")
        for axis, size in zip(self.axes, self.sizes):
            if not _AXIS.fullmatch(axis):
                raise OracleError(f"{axis!r} is no name for a mesh axis", hint="letters, digits and _: dp, tp, cp, pp")
            if size < 1 or self.axes.count(axis) > 1:
                raise OracleError(f"mesh axis {axis!r} {'has size ' + str(size) if size < 1 else 'comes twice'}")
        if self.world > _MOST_RANKS:
            raise OracleError(f"a mesh of {self.world} ranks is larger than {_MOST_RANKS}")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """From "dp=2,tp=4", slow → fast.

        Raises:
            OracleError: it is not of that form.
        """
        pairs = [part.split("=") for part in re.split(r"[,\s]+", text.strip()) if part]
        if any(len(p) != 2 or not re.fullmatch(r"\d{1,8}", p[1]) for p in pairs):
            raise OracleError(f"{text[:80]!r} is no mesh", hint='write axes slow → fast, "pp=2,dp=2,tp=4"')
        return cls(tuple(p[0] for p in pairs), tuple(int(p[1]) for p in pairs))

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes)) or "one rank"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def members(self, axis: str) -> tuple[str, ...]:
        """Axes of which a joint axis "dp+cp" is made, slow → fast; of a plain one, itself.

        Raises:
            OracleError: the mesh has no such axis.
        """
        found = tuple(axis.split("+"))
        for name in found:
            if name not in self.axes:
                raise OracleError(f"the mesh ({self}) has no axis {name!r}")
        return found

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return math.prod(self.sizes[self.axes.index(name)] for name in self.members(axis))

    def index(self, axis: str, coords: Mapping[str, int]) -> int:
        """Position along an axis; coordinates that are not given are 0."""
        at = 0
        for name in self.members(axis):
            at = at * self.size(name) + coords.get(name, 0)
        return at

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        if not 0 <= rank < self.world:
            raise OracleError(f"rank {rank} is not on the mesh ({self}, {self.world} ranks)")
        found: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes)):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at a position; coordinates that are not given are 0."""
        at = 0
        for axis, size in zip(self.axes, self.sizes):
            here = coords.get(axis, 0)
            if not 0 <= here < size:
                raise OracleError(f"{axis}={here} is not on the mesh ({self})")
            at = at * size + here
        return at


class Cut(msgspec.Struct, frozen=True):
    """What one mesh axis does to a tensor.

    Args:
        axis: of the mesh, or a joint axis "dp+cp".
        strategy: one of `sharding.registry()`.
        dim: the dimension, from the front or (negative) from the back; of no meaning for the partial strategies.
        options: of the strategy, e.g. the number of interleaved groups.
    """

    axis: str
    strategy: str = "chunk"
    dim: int = 0
    options: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        try:
            strategy(self.strategy)
        except ValueError as error:
            raise OracleError(f"axis {self.axis!r}: {error}") from None
        if not all(_AXIS.fullmatch(name) for name in self.axis.split("+")):
            raise OracleError(f"{self.axis[:80]!r} is no name for a mesh axis", hint="letters, digits and _; joint axes: dp+cp")
        if len(self.options) > _MOST_OPTIONS:
            raise OracleError(f"axis {self.axis!r}: more than {_MOST_OPTIONS} options")

    @classmethod
    def parse(cls, axis: str, spec: object) -> Cut:
        """From what plans write for an axis: 0, "interleaved:0:3", "uneven:1:[3,5]", "partial".

        Raises:
            OracleError: it is none of these.
        """
        if isinstance(spec, int) and not isinstance(spec, bool):
            return cls(axis, "chunk", spec)
        if isinstance(spec, str):
            spec = spec.strip()
            if re.fullmatch(r"-?\d{1,3}", spec):
                return cls(axis, "chunk", int(spec))
            if spec.startswith("partial") and ":" not in spec:
                return cls(axis, spec)
            if match := _SPEC.fullmatch(spec):
                options = tuple(int(n) for n in re.findall(r"\d+", match[3]))
                return cls(axis, match[1], int(match[2]), options)
        raise OracleError(
            f"axis {axis!r}: {str(spec)[:80]!r} is not a dimension and not a strategy",
            hint='a dimension (0, -1), or "strategy:dimension:options", e.g. "interleaved:0:3", or "partial"',
        )

    @property
    def reduction(self) -> str:
        """"sum", "avg", "max" or "min" when values are combined over the axis; "" when the axis cuts."""
        return strategy(self.strategy).reduction

    def slices(self, extent: int, parts: int, index: int) -> list[slice]:
        """The part of one rank along a dimension of `extent` elements.

        Raises:
            MappingError: the strategy cannot cut that extent.
        """
        try:
            return strategy(self.strategy).cut(extent, parts, index, self.options)
        except ValueError as error:
            raise MappingError(f"axis {self.axis!r}, dimension {self.dim} of {extent}: {error}") from None

    def __str__(self) -> str:
        if self.reduction:
            return f"{self.axis}:{self.strategy}"
        options = f":{list(self.options)}" if len(self.options) > 1 else "".join(f":{o}" for o in self.options)
        return f"{self.axis}:{self.dim}" if self.strategy == "chunk" else f"{self.axis}:{self.strategy}:{self.dim}{options}"


class Layout(msgspec.Struct, frozen=True):
    """How a logical tensor lies on a mesh.

    Args:
        cuts: what each axis does; axes not named replicate. Cuts of one dimension nest, the first outermost.
        padded: dimensions may be longer than the reference's, by padding at the end (a vocabulary rounded up to a
            multiple of the ranks).

    Raises:
        OracleError: an axis is named twice.
    """

    cuts: tuple[Cut, ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        names = [name for cut in self.cuts for name in cut.axis.split("+")]
        if twice := [name for name in names if names.count(name) > 1]:
            raise OracleError(f"axis {twice[0]!r} is named twice for one tensor: {self}")

    def __str__(self) -> str:
        return (" ".join(map(str, self.cuts)) or "replicated") + (", padded" if self.padded else "")

    def sorted(self, mesh: Mesh) -> Layout:
        """The same cuts in the order of the mesh, slow → fast; axes that it does not have go last, as written."""
        order = {axis: at for at, axis in enumerate(mesh.axes)}
        return Layout(tuple(sorted(self.cuts, key=lambda c: order.get(c.axis.split("+")[0], len(order)))), self.padded)

    def on(self, mesh: Mesh) -> Layout:
        """Without the axes that the mesh does not have: a size of 1."""
        return Layout(tuple(c for c in self.cuts if all(name in mesh.axes for name in c.axis.split("+"))), self.padded)

    def gradient(self) -> Layout:
        """Of the gradient of such a tensor: the gradient of an addend is the gradient of the sum."""
        return Layout(tuple(c for c in self.cuts if not c.reduction), self.padded)

    def by_dim(self, ndim: int) -> dict[int, list[Cut]]:
        """Cuts of each cut dimension, outermost first.

        Raises:
            MappingError: a cut names a dimension that the tensor does not have.
        """
        found: dict[int, list[Cut]] = {}
        for cut in self.cuts:
            if cut.reduction:
                continue
            if not -ndim <= cut.dim < ndim:
                raise MappingError(f"the layout ({self}) cuts dimension {cut.dim} of a tensor of {ndim} dimensions")
            found.setdefault(cut.dim % ndim, []).append(cut)
        return found

    def along(self, extent: int, cuts: Sequence[Cut], mesh: Mesh, coords: Mapping[str, int]) -> Index:
        """Global indices along one dimension that the rank at `coords` holds, in its order."""
        held = np.arange(extent, dtype=np.int64)
        for cut in cuts:
            parts = cut.slices(len(held), mesh.size(cut.axis), mesh.index(cut.axis, coords))
            held = held[parts[0]] if len(parts) == 1 else np.concatenate([held[p] for p in parts] or [held[:0]])
        return held

    def indices(self, full_shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]) -> list[Index]:
        """Global indices that the rank at `coords` holds, dimension by dimension: `full[np.ix_(*indices)]` is its shard."""
        cuts = self.by_dim(len(full_shape))
        return [self.along(extent, cuts.get(d, ()), mesh, coords) for d, extent in enumerate(full_shape)]


def rank_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1", the first eight of many: for a sentence."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
