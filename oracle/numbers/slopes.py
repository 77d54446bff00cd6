"""Errors below the noise: is a head, a shard or a chunk scaled, in the mean over all its elements?

For a part g of a tensor, α_g = <C-R, R> / <R, R>. Rounding errors point anywhere and cancel in it; a wrong factor does not.
It finds 1 % in one head, or a softmax scale off by 1 %, in bfloat16, where norms see nothing. It is judged against the
slopes of the samples with noise, pooled over the parts, since those of four samples of one part are too few to trust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.numbers.dtypes import as_float

Array = npt.NDArray[Any]

# Largest correct slope was 3.6 noise slopes end to end, 0.9 in a module alone (its inputs rewritten); the mistakes
# that only slopes show gave 4.8 to 36 and 8.7 to 13.
MULTIPLE: Final = 6.0
MULTIPLE_ALONE: Final = 3.0
FLOOR: Final = 0.05  # of u: a mean over a part cannot be trusted further
EMPTY: Final = 1e-3  # of ‖R‖/√G: parts smaller than that have no slope
_PARTS: Final = 8
_LEAST: Final = 32
_SURE: Final = 3.09  # normal quantile of 99.9 %: how sure we are that the noise is not larger than taken for


class Slopes(msgspec.Struct, frozen=True):
    """Slopes of the parts of one tensor.

    Attributes:
        alphas: α of each part, 0 for an empty one.
        solid: whether a part is large enough to have one.
    """

    alphas: tuple[float, ...]
    solid: tuple[bool, ...]


class SlopeFlag(msgspec.Struct, frozen=True):
    """A part whose slope is not noise.

    Attributes:
        part: its index.
        alpha: by how much it is scaled, less 1.
        ratio: |α| over what was allowed.
    """

    part: int
    alpha: float
    ratio: float


def cuts(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions and parts that are worth a look: up to eight parts of a dimension, each of at least 32 elements."""
    size = math.prod(shape)
    found = []
    for dim, extent in enumerate(shape):
        parts = min(_PARTS, extent)
        while parts > 1 and (extent % parts or size // parts < _LEAST):
            parts -= 1
        if parts > 1:
            found.append((dim, parts))
    return found


def slopes(candidate: Array, reference: Array, dtype: str, dim: int, parts: int) -> Slopes:
    """α of `parts` equal stretches along a dimension (the last is shorter where they do not divide it)."""
    c = np.moveaxis(candidate, dim, 0)
    r = np.moveaxis(reference, dim, 0)
    each = max(1, -(-c.shape[0] // parts))
    along, squares = np.zeros(parts), np.zeros(parts)
    for g in range(parts):
        x = as_float(np.ascontiguousarray(c[g * each : (g + 1) * each]), dtype).astype(np.float64).reshape(-1)
        y = as_float(np.ascontiguousarray(r[g * each : (g + 1) * each]), dtype).astype(np.float64).reshape(-1)
        fine = np.isfinite(x) & np.isfinite(y)
        x, y = x[fine], y[fine]
        along[g], squares[g] = (x - y) @ y, y @ y
    least = (EMPTY**2) * squares.sum() / parts
    solid = (squares > least) & (squares > 0)
    alphas = np.divide(along, squares, out=np.zeros(parts), where=solid)
    return Slopes(tuple(alphas.tolist()), tuple(bool(s) for s in solid))


def flags(seen: Slopes, noise_sq: Sequence[float], samples: int, u: float, *, alone: bool = False) -> list[SlopeFlag]:
    """Parts whose slope is larger than noise makes it.

    Args:
        seen: candidate against reference.
        noise_sq: mean over the samples of α² for each part.
        samples: behind them.
        u: unit roundoff of the tensor's dtype.
        alone: the module ran on rewritten inputs, so that no error of others is in it.
    """
    solid = [g for g, ok in enumerate(seen.solid) if ok and g < len(noise_sq)]
    if not solid or samples < 1:
        return []
    pooled = math.sqrt(math.fsum(noise_sq[g] for g in solid) / len(solid))
    sure = _upper(samples * len(solid))
    found = []
    for g in solid:
        noise = max(math.sqrt(noise_sq[g]), pooled * sure, FLOOR * u)
        ratio = abs(seen.alphas[g]) / ((MULTIPLE_ALONE if alone else MULTIPLE) * noise) if noise > 0 else 0.0
        if ratio > 1:
            found.append(SlopeFlag(g, seen.alphas[g], ratio))
    return found


def _upper(samples: int) -> float:
    """Upper 99.9 % bound of a standard deviation over its estimate from that many samples (Wilson and Hilferty 1931)."""
    spread = 2.0 / (9.0 * samples)
    low = max(0.05, 1.0 - spread - _SURE * math.sqrt(spread)) ** 3  # quantile of chi-squared over its degrees
    return 1.0 / math.sqrt(low)
