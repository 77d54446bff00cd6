"""A tensor as sums over small tiles: a linear sketch that is as small as a tensor of statistics and is cut as the tensor is.

Each dimension is divided into tiles of 4, 16 or 64 elements, of which a sum with signs is kept. The signs are (+, +, +, -), four by four:
a bent sequence, whose spectrum is flat, so an error that is constant over a tile, that alternates in it, or that is one element shows at its size.
The sketch is linear, so partial sums add up, and a shard that ends where tiles end is the same part of the sketch as it is of the tensor: shards are
found, put together and compared as tensors are. Of random errors d, E‖sketch(d)‖² = ‖d‖², so tolerances are formed in the same way too.
What is orthogonal to the signs in every tile is not seen; see `judging/statistics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

STEP: Final = 4  # elements of one level
LEVELS: Final = 3  # 64 elements along a dimension at most
PARTS: Final = 16  # even parts into which a dimension may be cut with every cut between two tiles
PARTS_ALONE: Final = 256  # … where no other one is tiled: errors of tensors of fewer numbers are estimated badly
QUANTUM: Final = 2.0**-40  # parameters are rounded to multiples of it, so that their sums are exact in any order and equal ones stay equal
ROWS_FIRST: Final = frozenset({"param", "param_as", "main_grad", "param_after", "opt_state", "buffer", "buffer_after"})  # dimension 0 is cut as others are
EXACT: Final = frozenset({"param", "param_as", "param_after"})  # … that are asked whether they are equal

T = TypeVar("T", bound=Any)  # torch's tensors and numpy's arrays have all that is asked of them here


def tiles_of(shape: tuple[int, ...], kind: str, *, positions: bool = False) -> tuple[int, ...]:
    """Elements of a tile along each dimension.

    The first dimension of what crosses a module stays as it is: rows are dealt out to ranks one by one.

    Args:
        shape: of the tensor, or of a shard of it, which gets the same tiles or finer ones.
        kind: as of `store.Entry`.
        positions: of what crosses a module with three dimensions or more, the second stays as it is, too: an engine computes positions one by one.
    """
    first = 0 if kind in ROWS_FIRST else 2 if positions and len(shape) > 2 else 1
    parts = PARTS if len(shape) - min(first, 1) > 1 else PARTS_ALONE
    return tuple(_tile(n, parts) if d >= first else 1 for d, n in enumerate(shape))


def _tile(n: int, parts: int) -> int:
    size = 1
    while n and size < STEP**LEVELS and n % (size * STEP * parts) == 0:
        size *= STEP
    return size


def sketch(values: T, tile: tuple[int, ...], done: tuple[int, ...] = ()) -> T:
    """Sums over tiles.

    Args:
        values: float64, shape S; of torch or of numpy.
        tile: elements along each dimension, powers of 4 that divide S.
        done: tiles that `values` are sums over already; () none.

    Returns:
        shape S / (tile / done).
    """
    done = done or (1,) * len(tile)
    for level in range(LEVELS):
        for dim in reversed(range(len(tile))):
            if done[dim] <= STEP**level < tile[dim]:
                values = _fourth(values, dim)
    return values


def _fourth(values: T, dim: int) -> T:
    before, after = (slice(None),) * (dim + 1), tuple(values.shape[dim + 1 :])
    parts = values.reshape(*values.shape[:dim], values.shape[dim] // STEP, STEP, *after)
    found: T = parts[(*before, 0)] + parts[(*before, 1)] + parts[(*before, 2)] - parts[(*before, 3)]
    return found


def coarser(own: tuple[int, ...], wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether sums over tiles become sums over larger ones.

    Args:
        own: tiles that there are sums over.
        wanted: larger tiles, or the same.
        shape: of the tensor.
    """
    return len(own) == len(wanted) and all(w >= o and n % w == 0 for o, w, n in zip(own, wanted, shape, strict=True))


def reduction(tile: tuple[int, ...]) -> int:
    """Elements behind one number."""
    return math.prod(tile)


def summed(parts: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The numbers of all elements (`Entry.stats`) from those of parts: how many, sum, sum of squares, least, greatest, how many are not finite."""
    n, total, square, low, high, lost = zip(*parts, strict=True)
    return math.fsum(n), math.fsum(total), math.fsum(square), min(low), max(high), math.fsum(lost)
