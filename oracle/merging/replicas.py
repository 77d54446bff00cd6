"""Replicas of one part of a tensor: are they equal bit for bit, along which mesh axes are they not, and who is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.numbers.dtypes import as_float

Array = npt.NDArray[Any]


class Shard(NamedTuple):
    """What one rank holds.

    Args:
        rank: of the candidate's world.
        coords: its position on the mesh; axes not given are at 0.
        array: the values, as stored.
        dtype: torch's name of their dtype where numpy has none ("bfloat16", "float8_e4m3fn"); "" for numpy's own.
    """

    rank: int
    coords: Mapping[str, int]
    array: Array
    dtype: str = ""


class Conflict(NamedTuple):
    """Replicas that are not equal bit for bit.

    Args:
        axis: mesh axes along which they differ, joined by "+" when it is not one: a missing collective over one axis
            leaves them equal along the others, one rank gone astray differs along all.
        ranks: all ranks that should be equal, sorted; of all parts that differ along that axis.
        majority: those that agree with most; empty when no value is held by more ranks than any other.
        minority: the others; all ranks in a tie.
        max_abs: largest difference of an element to the majority (in a tie: to the first rank).
        rel: largest ‖difference‖ / ‖majority‖ of a rank; infinite where one is not finite and the other is.
    """

    axis: str
    ranks: tuple[int, ...]
    majority: tuple[int, ...]
    minority: tuple[int, ...]
    max_abs: float
    rel: float


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal in shape and in every bit (NaN equals the same NaN, 0 is not −0)."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(_bits(a), _bits(b)))


def agree(replicas: Sequence[Shard]) -> Shard:
    """One of the replicas that most ranks hold; of the lowest rank among them."""
    groups = _groups(replicas)
    best = max(len(g) for g in groups)
    return min((g[0] for g in groups if len(g) == best), key=lambda shard: shard.rank)


def conflicts_of(parts: Sequence[Sequence[Shard]]) -> list[Conflict]:
    """Conflicts within parts, those along the same axes together."""
    found: dict[str, list[Conflict]] = {}
    for replicas in parts:
        groups = _groups(replicas)
        if len(groups) == 1:
            continue
        axis = _differing(replicas, groups)
        sizes = sorted((len(g) for g in groups), reverse=True)
        tie = sizes[0] == sizes[1]
        base = agree(replicas)
        majority = [] if tie else next(g for g in groups if any(s is base for s in g))
        minority = [s for g in groups if tie or g is not majority for s in g]
        sizes_off = [difference(base, s) for s in minority if s is not base]
        found.setdefault(axis, []).append(
            Conflict(
                axis,
                _ranks(replicas),
                _ranks(majority),
                _ranks(minority),
                max(a for a, _ in sizes_off),
                max(r for _, r in sizes_off),
            )
        )
    return [
        Conflict(
            axis,
            tuple(sorted(r for c in some for r in c.ranks)),
            tuple(sorted(r for c in some for r in c.majority)),
            tuple(sorted(r for c in some for r in c.minority)),
            max(c.max_abs for c in some),
            max(c.rel for c in some),
        )
        for axis, some in sorted(found.items())
    ]


def difference(base: Shard, other: Shard) -> tuple[float, float]:
    """Largest difference of an element and relative difference in norm; infinite where only one is finite."""
    a = as_float(base.array, base.dtype).astype(np.float64).reshape(-1)
    b = as_float(other.array, other.dtype).astype(np.float64).reshape(-1)
    if a.shape != b.shape:
        return float("inf"), float("inf")
    finite = np.isfinite(a) & np.isfinite(b)
    odd = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if odd.any():
        return float("inf"), float("inf")
    a, b = a[finite], b[finite]
    if not a.size:
        return 0.0, 0.0
    off, size = np.abs(a - b), max(float(np.abs(a).max()), float(np.abs(b).max())) or 1.0
    # Scaled, so that squares neither overflow nor vanish.
    norm = float(np.linalg.norm(a / size))
    wrong = float(np.linalg.norm((a / size) - (b / size)))
    return float(off.max()), (wrong / norm if norm else (float("inf") if wrong else 0.0))


def _groups(replicas: Sequence[Shard]) -> list[list[Shard]]:
    """Replicas by equal bits, each group by rank."""
    groups: list[list[Shard]] = []
    for shard in sorted(replicas, key=lambda s: s.rank):
        for group in groups:
            if same_bits(group[0].array, shard.array):
                group.append(shard)
                break
        else:
            groups.append([shard])
    return groups


def _differing(replicas: Sequence[Shard], groups: Sequence[Sequence[Shard]]) -> str:
    """Axes along which, all other coordinates being equal, values change."""
    group_of = {shard.rank: i for i, group in enumerate(groups) for shard in group}
    axes = [a for a in replicas[0].coords if len({s.coords.get(a, 0) for s in replicas}) > 1]
    found = []
    for axis in axes:
        lines: dict[tuple[int, ...], set[int]] = {}
        for shard in replicas:
            others = tuple(shard.coords.get(a, 0) for a in axes if a != axis)
            lines.setdefault(others, set()).add(group_of[shard.rank])
        if any(len(line) > 1 for line in lines.values()):
            found.append(axis)
    return "+".join(found or axes)


def _ranks(shards: Sequence[Shard]) -> tuple[int, ...]:
    return tuple(sorted(s.rank for s in shards))


def _bits(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    size = flat.dtype.itemsize
    return flat.view(f"u{size}" if size in (1, 2, 4, 8) else np.uint8)
