"""From the candidate's shards to its logical full tensors.

A shard's place is known from the plan or from its DTensor; otherwise it is found by content (`locate.py`), and where
content says nothing (zeros, or a tensor that is wrong) it lies as tensors of the same extents in its module do. Shards
of one place are replicas and must be equal. Source: TTrace §4.1, §4.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError, OracleError
from proctor.oracle.merging.align import PARAMETERS, Calls
from proctor.oracle.merging.averages import MEAN, averaged
from proctor.oracle.merging.locate import FITS, Found, Index, Part, locate, take
from proctor.oracle.merging.merge import Held, Whole, join, parts, where
from proctor.oracle.merging.padding import Holder, cropped, filled, own_shape, without
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.merging.replicas import Conflict, Shard
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating
from proctor.oracle.plans.mesh import Layout, Mesh, Shape
from proctor.oracle.plans.placements import from_dtensor
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry, later, slots_in

Array = npt.NDArray[Any]

PARTIAL: Final = "partial sums"
LIKE_NEIGHBOURS: Final = "as its neighbours"
PARAMETER_CALL: Final = -1  # the place of parameters among the calls of a module
REPLICA_AXES: Final = ("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "dp_replicate_shard", "data", "zero")
GRADIENTS: Final = ("grad_input", "grad_output")
ACTIVATIONS: Final = ("input", "output", *GRADIENTS)
LIKE: Final = {"main_grad": "param", "param_after": "param", "opt_state": "param", "grad_output": "output", "grad_input": "input"}


class Piece(NamedTuple):
    """A shard and where it lies.

    Args:
        rank: that holds it.
        entry: of its record.
        places: global indices along each dimension; `None` where nobody knows.
        label: in words.
        firm: there is no doubt about it.
        layout: where a plan or DTensor said it.
        addend: which part of a sum it is, where the layout has partial axes.
        kept: the shard's elements that lie there; `None` for all, the others are padding.
    """

    rank: int
    entry: Entry
    places: Index | None
    label: str
    firm: bool
    layout: Layout | None = None
    addend: tuple[int, ...] = ()
    kept: Index | None = None


class Merged(NamedTuple):
    """A tensor of the candidate: its values (`None` where its shards make up no whole), replicas that differ, shards."""

    full: Array | None
    conflicts: list[Conflict]
    pieces: list[Piece]


class Assembler:
    """Puts tensors of the candidate together.

    Args:
        reference: of which they are the counterparts.
        ranks: of the candidate.
        coords: where each rank stands.
        calls: which calls of the reference a rank's calls are.
        plan: what is known; `None` for nothing.
        pieces: shards of each tensor of the reference.
    """

    def __init__(
        self,
        reference: Reference,
        ranks: Mapping[int, RankRecord],
        coords: Mapping[int, Mapping[str, int]],
        calls: Mapping[int, Calls],
        plan: Plan | None,
        pieces: Mapping[Key, list[tuple[int, Entry]]],
    ) -> None:
        self.reference, self.ranks, self.coords, self.calls, self.plan, self.pieces = reference, ranks, coords, calls, plan, pieces
        self.mesh = plan.mesh if plan is not None else Mesh()
        self.gradient_scales: dict[int, float] = {}  # by which gradient of several in one call it is
        self.padded: dict[Key, list[Piece]] = {}  # of tensors that were merged: shards with padding
        self._places: dict[tuple[Any, ...], Part] = {}
        self._otherwise: set[tuple[int, str]] = set()  # modules of ranks that are cut in another way than their namesakes in other layers
        self._extents: dict[tuple[Any, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    @property
    def gradient_scale(self) -> float:
        """By what the candidate's gradients of activations are larger, those of the first backward pass past an edge."""
        return self.gradient_scales.get(0, 1.0)

    def scale(self, kind: str, slot: str) -> float:
        """The same of a tensor; 1 of what is no gradient of an activation."""
        return self.gradient_scales.get(later(slot), self.gradient_scale) if kind in GRADIENTS else 1.0

    def alike_after(self, step: int, name: str) -> bool:
        """Whether ranks that hold the same part of a parameter hold the same bits of it after a step."""
        merged = self.merge((step, 0, "param_after", name, ""))
        if merged is None or any(p.places is None for p in merged.pieces):
            return False
        seen = {(tuple(i.tobytes() for i in p.places or ()), self.values(p).tobytes()) for p in merged.pieces}
        return len(seen) == len({places for places, _ in seen})

    def merge(self, key: Key) -> Merged | None:
        """The candidate's tensor; `None` where no rank has a shard of it."""
        held = self.pieces.get(key)
        if not held:
            return None
        target = self.reference.entries[key]
        order = self.plan.activation_order(key[3], key[2], key[4]) if self.plan is not None and key[2] in ACTIVATIONS else None
        if order is not None and len(order) == len(target.shape):
            shape = [0] * len(order)
            for at, dim in enumerate(order):
                shape[dim] = target.shape[at]
            target = msgspec.structs.replace(target, shape=tuple(shape))
        pieces = [self.place(rank, entry, key, target) for rank, entry in held]
        if padded := [p for p in pieces if p.kept is not None]:
            self.padded[key] = padded
        if any(p.entry.span is not None for p in pieces):
            return self._merge_flat(key, target, pieces)
        if key[2] not in PARAMETERS and any(p.places is None or not p.firm for p in pieces):
            # The root of a pipeline stage is called like the model: its hidden states are none of the model's outputs.
            fitting = [p for p in pieces if p.places is not None and (p.firm or p.entry.shape == target.shape)]
            pieces = fitting if fitting else pieces
        if any(p.places is None for p in pieces):
            return Merged(None, [], pieces)
        summed = self._summed(key, target, pieces)
        if summed is not None:
            return Merged(summed, [], [p._replace(label=PARTIAL, firm=False) for p in pieces])
        mean = averaged(self, key, pieces)
        if mean is not None:
            return Merged(from_float(mean, target.dtype), [], [p._replace(label=MEAN, firm=False) for p in pieces])
        full, conflicts = join([self._held(p) for p in pieces], target.shape)
        if full is None:
            return Merged(None, conflicts, pieces)
        full = _as(full, pieces[0].entry.dtype, target.dtype)
        return Merged(full if order is None else np.ascontiguousarray(full.transpose(order)), conflicts, pieces)

    def _summed(self, key: Key, target: Entry, pieces: Sequence[Piece]) -> Array | None:
        """The sum of what ranks hold of the same part, where that is the reference's and no single one is: partial sums.

        A module that is cut by output gets an input gradient that is a sum over the ranks, whichever part of the batch or
        sequence it is of; so gradients may be sums also where their place is known.
        """
        if key[2] not in ("output", *GRADIENTS) or len(pieces) < 2 or not is_floating(target.dtype):
            return None
        if key[2] == "output" and any(p.firm or p.entry.shape != target.shape for p in pieces):
            return None
        if any(p.addend for p in pieces):
            return None
        theirs = self.reference.floats(target)
        theirs = theirs * self.scale(key[2], key[4])
        whole = Whole(target.shape, np.float64)
        alone = together = 0.0
        for part in parts([self._held(p) for p in pieces]):
            addends = {one.shard.array.tobytes(): as_float(one.shard.array, one.shard.dtype).astype(np.float64) for one in part}
            if len(addends) < 2 and bool(next(iter(addends.values())).any()):
                return None  # zeros are addends as well: an expert that got no token of this part
            expected, values = take(theirs, part[0].places), np.asarray(sum(addends.values()))
            whole.put(part[0].places, values)
            alone += min(float(np.linalg.norm(v - expected)) for v in addends.values()) ** 2
            together += float(np.linalg.norm(values - expected)) ** 2
        size = float(np.linalg.norm(theirs))
        if not whole.complete() or together**0.5 >= min(0.1 * alone**0.5, FITS * size):
            return None
        return from_float(whole.values, target.dtype)

    def values(self, piece: Piece) -> Array:
        """What a rank holds of the reference's tensor: its shard without padding."""
        return without(self.ranks[piece.rank].array(piece.entry), piece.kept)

    def given(self, piece: Piece, values: Array) -> Array:
        """Float values in the place of a rank's own. Its padding stays as it is; a gradient has none there."""
        own = as_float(self.ranks[piece.rank].array(piece.entry), piece.entry.dtype)
        return filled(np.zeros_like(own) if piece.entry.kind in GRADIENTS else own, piece.kept, values)

    def placed(self, key: Key) -> list[Piece]:
        """The candidate's shards of a tensor, with their places."""
        return [self.place(rank, entry, key, self.reference.entries[key]) for rank, entry in self.pieces.get(key, [])]

    def _held(self, piece: Piece) -> Held:
        """A piece with its values."""
        assert piece.places is not None
        coords = self.coords[piece.rank] or {"rank": piece.rank}
        shard = Shard(piece.rank, coords, self.values(piece), piece.entry.dtype)
        return Held(shard, piece.places, piece.addend, piece.layout or Layout())

    def _merge_flat(self, key: Key, target: Entry, pieces: list[Piece]) -> Merged:
        """Flat shards of one parameter, each of a rank's local part."""
        like = (0, 0, "param", key[3], "")
        homes = {home.rank: home for home in self.placed(like)}
        size = math.prod(target.shape)
        held: list[Held] = []
        for piece in pieces:
            home, span = homes.get(piece.rank), piece.entry.span
            if home is None or home.places is None or span is None:
                return Merged(None, [], pieces)
            whole = take(np.arange(size).reshape(target.shape), home.places)
            local = filled(np.full(home.entry.shape, size), home.kept, whole).ravel()[slice(*span)]
            places, kept = cropped((local,), (size,))
            held.append(self._held(piece._replace(places=places, kept=kept)))
        full, conflicts = join(held, (size,))
        if full is None:
            return Merged(None, conflicts, pieces)
        return Merged(_as(full.reshape(target.shape), pieces[0].entry.dtype, target.dtype), conflicts, pieces)

    def place(self, rank: int, entry: Entry, key: Key, target: Entry) -> Piece:
        """Where a shard lies: by the plan, by its DTensor, or by content."""
        if entry.span is not None:
            return Piece(rank, entry, None, "flat", firm=True)
        for layout, mesh, coords, label, shape in self._known(rank, entry, key, target):
            try:
                places, addend = where(layout, mesh, coords, shape)
            except OracleError:
                continue
            if tuple(map(len, places)) == entry.shape:
                places, kept = cropped(places, target.shape)
                return Piece(rank, entry, places, label, firm=True, layout=layout, addend=addend, kept=kept)
        module = self._module(rank, key)
        leaf = key[3].rpartition(".")[2] if key[2] in PARAMETERS else slots_in(entry.slot)[0] if key[2] in ACTIVATIONS else ""
        kind, call = LIKE.get(key[2], key[2]), entry.call if target.shape != entry.shape else 0
        pattern = (rank, kind, module, leaf, entry.shape, target.shape, call)
        known = self._places.get(pattern)
        if known is not None and key[2] == "param" and "#" in module and entry.shape != target.shape and self._elsewhere(rank, entry, target, known):
            self._otherwise.add((rank, _owner(key)))
            return self.place(rank, entry, key, target)
        if known is not None:
            return Piece(rank, entry, known.places, known.label, firm=True, kept=known.kept)
        if entry.shape == target.shape:
            alone = len(self.ranks) == 1 and len(self.pieces.get(key, ())) == 1  # one process against one, and no part of several
            index = tuple(np.arange(n, dtype=np.int64) for n in entry.shape)
            return Piece(rank, entry, index, "whole", firm=key[2] in PARAMETERS or key[2] == "scalar" or alone)
        if len(entry.shape) != len(target.shape):
            return Piece(rank, entry, None, "", firm=False)
        mine, theirs = as_float(self.ranks[rank].array(entry), entry.dtype), self.reference.floats(target)
        mine = mine / self.scale(key[2], key[4])
        found = locate(mine, theirs, padded=True, slices=key[2] in PARAMETERS)
        own = self._beside(rank, entry, target, module)
        if found is not None and found.error and own is not None and (off := _off(mine, theirs, own)) < found.error:
            found = Found(own, off, sure=off < FITS)  # as its parameters are cut, in a way that no block is: a fused projection
        if found is not None and found.sure:
            places, label, kept = self._places[pattern] = found.part
            call = PARAMETER_CALL if key[2] in PARAMETERS else entry.call
            for whole, part, along, inside in zip(target.shape, entry.shape, places, kept or map(np.arange, entry.shape), strict=True):
                for name in (module, ""):
                    self._extents.setdefault((rank, call, name, part, whole), (along, inside))
            return Piece(rank, entry, places, label, firm=True, kept=kept)
        # Values that say nothing (zeros), or that are wrong: as its neighbours of the same extents lie.
        for name in (module, ""):
            beside = self._beside(rank, entry, target, name)
            if beside is not None:
                sure = key[2] in PARAMETERS and bool(name)
                firm = sure or (beside.kept is not None and _off(mine, theirs, beside) < FITS)
                return Piece(rank, entry, beside.places, beside.label, firm=firm, kept=beside.kept)
        return Piece(rank, entry, found.part.places if found is not None else None, found.part.label if found is not None else "", firm=False)

    def _module(self, rank: int, key: Key) -> str:
        """Of which module a tensor is: layers are cut alike, but for those that are known to be cut otherwise."""
        path = _owner(key)
        return path if (rank, path) in self._otherwise else re.sub(r"\d+", "#", path) or "."

    def _elsewhere(self, rank: int, entry: Entry, target: Entry, known: Part) -> bool:
        """Whether a parameter is another part of the whole than that of the other layers."""
        mine, theirs = as_float(self.ranks[rank].array(entry), entry.dtype), self.reference.floats(target)
        if _off(mine, theirs, known) < FITS:
            return False
        found = locate(mine, theirs, padded=True, slices=True)
        return found is not None and found.sure and found.error < FITS

    def _beside(self, rank: int, entry: Entry, target: Entry, module: str) -> Part | None:
        """Where a shard lies if it lies as what was found of its module does, in this call or of its parameters; "" is any module."""
        held: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for whole, part in zip(target.shape, entry.shape, strict=True):
            calls = (entry.call, PARAMETER_CALL) if part != whole else ()
            known = next((k for call in calls if (k := self._extents.get((rank, call, module, part, whole))) is not None), None)
            if part != whole and known is None:
                return None
            held.append(known or (np.arange(part), np.arange(part)))
        places, kept = tuple(h[0] for h in held), tuple(h[1] for h in held)
        return Part(places, LIKE_NEIGHBOURS, None if all(len(k) == n for k, n in zip(kept, entry.shape)) else kept)

    def _known(self, rank: int, entry: Entry, key: Key, target: Entry) -> Iterator[tuple[Layout, Mesh, Mapping[str, int], str, Shape]]:
        """Layouts that are said, each with the coordinates of the rank and the shape of what is cut."""
        kind = key[2]
        if entry.placement is not None:
            mesh, layout, shape = from_dtensor(msgspec.to_builtins(entry.placement))
            position = self._placement_coords(rank, mesh)
            yield layout, mesh, position, str(layout), _longer(shape, target.shape)
        if self.plan is None:
            return
        name = key[3]
        if kind in PARAMETERS:
            found = self.plan.param_layout(name)
        elif kind not in ACTIVATIONS:
            found = None
        else:
            found = self.plan.activation_layout(name, kind, entry.slot)
        if found is None:
            return
        layout = found.on(self.mesh)
        yield layout, self.mesh, self.coords[rank], str(layout), self._cut(layout, entry, key, target)
        # Replicas that are calls of the reference are no cut of its tensors.
        rest = Layout(tuple(c for c in layout.cuts if not set(c.axis.split("+")) & set(REPLICA_AXES)), layout.padded)
        if rest != layout and self.calls[rank].ratio > 1:
            yield rest, self.mesh, self.coords[rank], str(rest), self._cut(rest, entry, key, target)

    def _cut(self, layout: Layout, entry: Entry, key: Key, target: Entry) -> Shape:
        """The shape of what a plan's layout cuts: the reference's, or one with padding."""
        if not layout.padded or len(entry.shape) != len(target.shape):
            return target.shape
        held = [Holder(self.coords[rank], other.shape) for rank, other in self.pieces.get(key, ())]
        try:
            return _longer(own_shape(layout, self.mesh, entry.shape, held) or target.shape, target.shape)
        except MappingError:
            return target.shape

    def _placement_coords(self, rank: int, mesh: Mesh) -> Mapping[str, int]:
        """Where a rank stands on a DTensor's mesh: a mesh of its own, or one that the whole world shares."""
        coords = self.coords[rank] or self.ranks[rank].info.coords
        if all(a in coords for a in mesh.axes):
            return {a: coords[a] for a in mesh.axes}
        return mesh.coords(rank % mesh.world)


def _longer(shape: Shape, least: Shape) -> Shape:
    """A shape, where no dimension of it is shorter than that of another one; else the other one."""
    return shape if len(shape) == len(least) and all(a >= b for a, b in zip(shape, least)) else least


def _as(values: Array, dtype: str, wanted: str) -> Array:
    return values if dtype == wanted else from_float(as_float(values, dtype), wanted)


def _off(mine: Array, theirs: Array, part: Part) -> float:
    """How far a shard is from a part of the whole, relative to that."""
    mine, other = mine if part.kept is None else take(mine, part.kept), take(theirs, part.places)
    size = float(np.linalg.norm(other.ravel()))
    return float(np.linalg.norm((mine - other).ravel())) / size if size and mine.shape == other.shape else np.inf


def _owner(key: Key) -> str:
    """Of which module a tensor is."""
    return key[3].rpartition(".")[0] if key[2] in PARAMETERS else key[3]
