"""Losses that a model returns: each data-parallel rank has the mean over its own rows, the reference that over all of them.

Such a number is compared as the mean over ranks, weighted by their rows; it does not decide, since what a loss is averaged over
is the program's business. Its gradient is 1 on each of them, of which the ranks' gradients are averaged later: as that of a
mean it counts once for each part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from proctor.oracle.numbers.dtypes import as_float, is_floating

if TYPE_CHECKING:
    from proctor.oracle.merging.assemble import Assembler, Piece
    from proctor.oracle.merging.reference import Key

Array = npt.NDArray[Any]

MEAN: Final = "mean over ranks"


def averaged(assembler: Assembler, key: Key, pieces: Sequence[Piece]) -> Array | None:
    """The number of which ranks hold their parts, as float64; `None` where they do not.

    Args:
        assembler: of the candidate.
        key: of the reference, an output or the gradient of one.
        pieces: the ranks' numbers.
    """
    target = assembler.reference.entries[key]
    if key[2] not in ("output", "grad_output") or math.prod(target.shape) != 1 or not is_floating(target.dtype) or len(pieces) < 2:
        return None
    if any(p.addend or p.entry.shape != target.shape for p in pieces):
        return None
    if key[2] == "grad_output":
        value = assembler.merge((*key[:2], "output", *key[3:]))
        if value is None or any(p.label != MEAN for p in value.pieces):
            return None
    shares = _shares(assembler, key)
    numbers: dict[tuple[bytes, ...], tuple[float, Array]] = {}
    for piece in pieces:
        if (piece.rank, piece.entry.call) not in shares:
            return None
        place, share = shares[piece.rank, piece.entry.call]
        values = as_float(assembler.ranks[piece.rank].array(piece.entry), piece.entry.dtype).astype(np.float64)
        if not np.array_equal(numbers.setdefault(place, (share, values))[1], values):
            return None  # replicas that differ
    if len(numbers) < 2 or abs(sum(share for share, _ in numbers.values()) - 1) > 1e-9:
        return None
    if key[2] == "output" and len({values.tobytes() for _, values in numbers.values()}) < 2:
        return None  # averaged within the model
    return np.asarray(sum(v if key[2] == "grad_output" else share * v for share, v in numbers.values()))


def _shares(assembler: Assembler, key: Key) -> dict[tuple[int, int], tuple[tuple[bytes, ...], float]]:
    """Of each rank and call of it, which part of the module's input it has and how much of it that is; without ranks that have all of it."""
    found: dict[tuple[int, int], tuple[tuple[bytes, ...], float]] = {}
    for slot in assembler.reference.slots.get((*key[:2], "input", key[3]), ()):
        there = (*key[:2], "input", key[3], slot)
        whole = math.prod(assembler.reference.entries[there].shape)
        for piece in assembler.placed(there):
            if piece.firm and piece.places is not None and piece.kept is None:
                share = math.prod(map(len, piece.places)) / whole if whole else 1.0
                if share < 1:
                    found.setdefault((piece.rank, piece.entry.call), (tuple(i.tobytes() for i in piece.places), share))
    return found
