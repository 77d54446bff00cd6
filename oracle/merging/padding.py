"""Padding: dimensions of the candidate that are longer than the reference's, by elements behind the reference's last.

A vocabulary is rounded up so that ranks get equal parts of it (Megatron's `make_vocab_size_divisible_by`), and logits have
as many. A shard is cropped to what the reference has before it is compared. What lies behind is no part of the
computation, so its gradient should be zero: where it is not, that is said, and a norm that it changes is a wrong norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.locate import Index, take
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.plans.mesh import Layout, Mesh, rank_text

if TYPE_CHECKING:
    from proctor.oracle.merging.assemble import Assembler, Piece

Array = npt.NDArray[Any]

SHOWN: Final = 4  # names in a sentence
WORDS: Final = {"grad_output": "that of the output of", "grad_input": "that of the input of", "main_grad": "that of"}


class Holder(NamedTuple):
    """A shard: where its rank stands, and its shape."""

    coords: Mapping[str, int]
    shape: tuple[int, ...]


def own_shape(layout: Layout, mesh: Mesh, shape: tuple[int, ...], held: Sequence[Holder]) -> tuple[int, ...] | None:
    """The shape of the candidate's whole, padding included.

    Args:
        layout: of the tensor.
        mesh: on which it lies.
        shape: of one shard.
        held: all shards.

    Returns:
        None where a part is missing, or ranks at one place have other extents.

    Raises:
        MappingError: the layout cuts a dimension that the tensor does not have.
    """
    whole = list(shape)
    for dim, cuts in layout.by_dim(len(shape)).items():
        extents: dict[tuple[int, ...], int] = {}
        for one in held:
            at = tuple(mesh.index(cut.axis, one.coords) for cut in cuts)
            if len(one.shape) != len(shape) or extents.setdefault(at, one.shape[dim]) != one.shape[dim]:
                return None
        if len(extents) != np.prod([mesh.size(cut.axis) for cut in cuts]):
            return None
        whole[dim] = sum(extents.values())
    return tuple(whole)


def cropped(places: Index, shape: Sequence[int]) -> tuple[Index, Index | None]:
    """Places within a whole of this shape, and which of the shard's elements lie there; `None` where all do."""
    inside = [index < extent for index, extent in zip(places, shape, strict=True)]
    if all(bool(one.all()) for one in inside):
        return places, None
    return tuple(i[one] for i, one in zip(places, inside)), tuple(np.flatnonzero(one) for one in inside)


def without(values: Array, kept: Index | None) -> Array:
    """A shard's values without its padding."""
    return values if kept is None else np.ascontiguousarray(take(values, kept))


def filled(own: Array, kept: Index | None, values: Array) -> Array:
    """Other values in a shard, whose padding stays as it is."""
    if kept is None:
        return values
    out = own.astype(values.dtype)
    out[np.ix_(*kept)] = values
    return out


# -- what is said -------------------------------------------------------------------------------------------------


def notes(assembler: Assembler) -> list[str]:
    """Which parameters are padded, and where padding has a gradient.

    Args:
        assembler: of the candidate; all tensors have been merged.
    """
    where: dict[str, list[str]] = {}
    for key, pieces in assembler.padded.items():
        if key[2] == "param" and key[0] == 0:
            where.setdefault(_extent(pieces), []).append(key[3])
    out = [f"padding, which the reference has not, is not compared: {_some(names)} {extent}" for extent, names in where.items()]
    order = {key: entry.order for key, entry in assembler.reference.entries.items()}
    moved = [key for key in sorted(assembler.padded, key=lambda k: (k[0], order[k])) if key[2] in WORDS and gradient(assembler, assembler.padded[key]) > 0]
    if moved:
        step, _, kind, name, _ = moved[0]
        size = gradient(assembler, assembler.padded[moved[0]])
        first = f"{WORDS[kind]} {name or 'the model'} (its norm is {size:.3g}, step {step})"
        out.append(f"the gradient of padding is not zero, first in {first}: padding takes part in what is computed")
    return out


def gradient(assembler: Assembler, pieces: Sequence[Piece]) -> float:
    """Norm of what lies behind the reference's last element, of replicas once."""
    seen: dict[tuple[bytes, ...], float] = {}
    for piece in pieces:
        if piece.kept is None or piece.places is None:
            continue
        values = as_float(assembler.ranks[piece.rank].array(piece.entry), piece.entry.dtype).astype(np.float64)
        outside = values.copy()
        outside[np.ix_(*piece.kept)] = 0.0
        seen[(*(i.tobytes() for i in piece.places), values.tobytes())] = float(np.square(outside).sum())
    return float(np.sqrt(sum(seen.values())))


def _extent(pieces: Sequence[Piece]) -> str:
    """In which dimension, by how much and where."""
    words: dict[str, list[int]] = {}
    for piece in pieces:
        assert piece.kept is not None
        for dim, (kept, extent) in enumerate(zip(piece.kept, piece.entry.shape, strict=True)):
            if len(kept) < extent:
                words.setdefault(f"{extent - len(kept)} of {extent} elements of dimension {dim}", []).append(piece.rank)
    return "in " + ", ".join(f"{text} on {rank_text(ranks)}" for text, ranks in words.items())


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
