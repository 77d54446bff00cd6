"""Where a shard lies in the whole, found by looking: which part of the reference's tensor is it?

A plan says it when there is one, and a DTensor says it by itself. Without either, the shard of a healthy run *is* some
part of the reference's tensor up to rounding, so the parts that its shape allows are tried: contiguous blocks along each
dimension that is shorter than the whole, interleaved groups (fused QKV), and the two-ended stripes of context
parallelism. A wrong part is off by as much as the values themselves, so there is no doubt where one fits. Where none
fits, the last block may be padded: a vocabulary rounded up to a multiple of the ranks. Where that is not so either, the
caller falls back on what fitted tensors of the same shape. A shard none of whose blocks fits may be made of single slices, looked up one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = tuple[npt.NDArray[np.int64], ...]

FITS: Final = 0.5  # relative error below which a part is the right one: a wrong one has about 1.4
CLEAR: Final = 0.1  # … and the next best one must be this much worse
GROUPS: Final = (2, 3, 4, 6, 8)  # interleaved groups that are tried
MOST_TRIES: Final = 4096
SAMPLE: Final = 1 << 16  # elements that are compared for a try
PADDED_FITS: Final = 0.1  # for a shard with padding: correct ones differ by rounding, positive tensors resemble each other
TELLING: Final = 16  # elements that a padded shard must have before its padding


class Part(NamedTuple):
    """One way to hold a part of a tensor.

    Args:
        places: global indices along each dimension.
        label: in words: `0:1/2` (dimension 0, part 1 of 2), `0:1/2x3` (interleaved), `0:1/2z` (two-ended stripes), `0:64+36p` (padded).
        kept: the shard's elements that lie there; `None` for all, the others are padding.
    """

    places: Index
    label: str
    kept: Index | None = None


class Found(NamedTuple):
    """The best part, its relative error, and whether it can be no other."""

    part: Part
    error: float
    sure: bool


def locate(local: Array, full: Array, *, padded: bool = False, slices: bool = False) -> Found | None:
    """Find which part of `full` the values of `local` are.

    Args:
        local: float values of a shard.
        full: float values of the whole; as many dimensions.
        padded: a shard that fits nowhere may have padding behind the whole's last element.
        slices: it may also be single slices of the whole in some order. For parameters: which rows an activation has may be a matter of data.

    Returns:
        None where the shape allows no part.
    """
    found = _locate(local, full)
    if local.ndim != full.ndim or (found is not None and (found.error == 0.0 or (found.error < FITS and not slices))):
        return found
    exact = _slice_by_slice(local, full) if slices else None  # a block of which three quarters are right is near as well
    if exact is not None or (found is not None and found.error < FITS):
        return exact or found
    return (_padded(local, full) if padded else None) or found


def _slice_by_slice(local: Array, full: Array) -> Found | None:
    """The shard as slices of one dimension in whatever order, each of them equal to one of the whole's and to no other: fused
    projections whose parts are of unequal sizes (grouped queries), layouts of people's own."""
    cut = [d for d, (a, b) in enumerate(zip(local.shape, full.shape, strict=True)) if a != b]
    if len(cut) != 1 or local.shape[cut[0]] > full.shape[cut[0]]:
        return None
    mine, theirs = (np.ascontiguousarray(np.moveaxis(x, cut[0], 0)).reshape(x.shape[cut[0]], -1) for x in (local, full))
    where = {row.tobytes(): i for i, row in enumerate(theirs)}
    found = [where.get(row.tobytes(), -1) for row in mine]
    if len(where) < len(theirs) or min(found, default=-1) < 0 or len(set(found)) < len(found):
        return None
    places = tuple(np.array(found, dtype=np.int64) if d == cut[0] else np.arange(n, dtype=np.int64) for d, n in enumerate(full.shape))
    return Found(Part(places, f"{cut[0]}: {len(found)} slices"), 0.0, sure=True)


def _padded(local: Array, full: Array) -> Found | None:
    """The shard as the last block of one or more dimensions, and beyond."""
    choices = []
    for d, (a, b) in enumerate(zip(local.shape, full.shape, strict=True)):
        here = [(index, label, np.arange(a)) for index, label in _along(d, a, b)] if a <= b else []
        if a and b % a:
            start = b - b % a
            here.append((np.arange(start, b, dtype=np.int64), f"{d}:{start}+{b - start}p", np.arange(b - start)))
        choices.append(here)
    best: Found | None = None
    for chosen in itertools.islice(itertools.product(*choices), MOST_TRIES):
        kept = tuple(k for _, _, k in chosen)
        if all(len(k) == n for k, n in zip(kept, local.shape)):
            continue
        mine = take(local, kept)
        if mine.size < TELLING or bool((mine == mine.ravel()[0]).all()):
            continue
        part = Part(tuple(i for i, _, _ in chosen), " ".join(label for _, label, _ in chosen if label), kept)
        error = _error(mine, full, part.places, float(np.linalg.norm(mine.ravel()[:SAMPLE])))
        if error < (best.error if best is not None else PADDED_FITS):
            best = Found(part, error, sure=True)
    return best


def _locate(local: Array, full: Array) -> Found | None:
    if local.ndim != full.ndim or any(a > b for a, b in zip(local.shape, full.shape, strict=True)):
        return None
    scale = float(np.linalg.norm(local.ravel()[:SAMPLE]))
    best: Found | None = None
    second = np.inf
    tried: set[tuple[int, ...]] = set()
    for part in itertools.islice(parts(local.shape, full.shape), MOST_TRIES):
        places = tuple(hash(i.tobytes()) for i in part.places)
        if places in tried:
            continue  # the same part under another name
        tried.add(places)
        error = _error(local, full, part.places, scale)
        if best is None or error < best.error:
            second = best.error if best is not None else np.inf
            best = Found(part, error, sure=False)
        else:
            second = min(second, error)
    if best is None:
        return None
    whole = local.shape == full.shape
    return best._replace(sure=best.error < FITS and (whole or second > best.error + CLEAR))


def parts(local: tuple[int, ...], full: tuple[int, ...]) -> Iterator[Part]:
    """All parts of a tensor that have the shape of a shard."""
    choices = [list(_along(d, a, b)) for d, (a, b) in enumerate(zip(local, full, strict=True))]
    for chosen in itertools.product(*choices):
        yield Part(tuple(index for index, _ in chosen), " ".join(label for _, label in chosen if label))


def _along(dim: int, local: int, full: int) -> Iterator[tuple[npt.NDArray[np.int64], str]]:
    everything = np.arange(full, dtype=np.int64)
    if local == full:
        yield everything, ""
        return
    if local == 0:
        return
    if full % local:  # uneven: the pieces of torch.chunk, and those that begin where shorter ones end
        for start in sorted({0, full - local, *range(0, full - local + 1, local)}):
            yield everything[start : start + local], f"{dim}:{start}+{local}"
        return
    n = full // local
    for k in range(n):
        yield everything[k * local : (k + 1) * local], f"{dim}:{k}/{n}"
    if local % 2 == 0 and n > 1:
        half = local // 2
        for k in range(n):
            ends = np.concatenate([everything[k * half : (k + 1) * half], everything[full - (k + 1) * half : full - k * half]])
            yield ends, f"{dim}:{k}/{n}z"
    for g in GROUPS:
        if local % g or full // g < n:
            continue
        for k in range(n):
            yield everything.reshape(g, n, local // g)[:, k].ravel(), f"{dim}:{k}/{n}x{g}"
    for k in range(n):
        if local > 1:
            yield everything[k::n], f"{dim}:{k}/{n}s"


def near(mine: Array, theirs: Array) -> bool:
    """Whether values are those of another tensor but for an error that no wrong place has."""
    return mine.shape == theirs.shape and float(np.linalg.norm((mine - theirs).ravel())) < FITS * float(np.linalg.norm(theirs.ravel()))


def take(full: Array, index: Index) -> Array:
    """The part of a tensor at these indices; a view where every index is a run."""
    runs = [_run(i) for i in index]
    if all(r is not None for r in runs):
        return full[tuple(r for r in runs if r is not None)]
    return full[np.ix_(*index)]


def _run(index: npt.NDArray[np.int64]) -> slice | None:
    if index.size == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == index.size and bool((np.diff(index) == 1).all()) else None


def _error(local: Array, full: Array, index: Index, scale: float) -> float:
    other = take(full, index)
    if local.size > SAMPLE:
        step = local.size // SAMPLE + 1
        a, b = local.ravel()[::step], other.ravel()[::step]
        scale = float(np.linalg.norm(a))
    else:
        a, b = local, other
    with np.errstate(invalid="ignore", over="ignore"):
        off = float(np.linalg.norm((a - b).ravel()))
    if not np.isfinite(off):
        return float("inf")
    if scale == 0.0:
        return 0.0 if off == 0.0 else float("inf")
    return off / scale
