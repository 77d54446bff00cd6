"""The fingerprint of `fingerprint.h` in numpy: oracle of the native one, and what runs where it was not built.

Same functions, same bits, about a hundredth of the speed. Norms agree to 1e-6 relative (fp32 partial sums there,
float64 here). Addresses are of memory in this process; the caller keeps it alive.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("the word order of 8-byte elements assumes little-endian memory")

Words = NDArray[np.uint64]

LANES: Final = 512
SEED: Final = 0x70726F63746F7221
BIAS: Final = 0x9E3779B9
ZERO: Final = 2
NONFINITE: Final = 4
CONSTANT: Final = 8
FLOAT, BFLOAT16, INT, UNSIGNED, RAW, COMPLEX = range(6)

_CHUNK_WORDS: Final = 1 << 20  # 8 MiB of uint64 a temporary


def splitmix64(z: Words) -> Words:
    """Scramble 64-bit integers (Steele, Lea, Flood 2014): where all keys come from."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def lane_keys() -> Words:
    """The 512 odd keys T."""
    return splitmix64(np.uint64(SEED) + np.arange(LANES, dtype=np.uint64)) | np.uint64(1)


_LANE_KEYS: Final = lane_keys()


def hash_words(words: NDArray[Any], start: int = 0) -> int:
    """Hash 32-bit words whose first has global word index `start`; parts of a whole add up mod 2^64."""
    total = 0
    for low in range(0, words.size, _CHUNK_WORDS):
        w = words[low : low + _CHUNK_WORDS].astype(np.uint64)
        index = np.uint64((start + low) % (1 << 64)) + np.arange(w.size, dtype=np.uint64)
        block_keys = splitmix64(index >> np.uint64(9)) | np.uint64(1)
        x = (w ^ (w >> np.uint64(16))) + np.uint64(BIAS)
        total += int((block_keys * _LANE_KEYS[index & np.uint64(LANES - 1)] * x).sum(dtype=np.uint64))
    return total % (1 << 64)


def _numbers(raw: NDArray[np.uint8], elem_bytes: int, kind: int) -> NDArray[Any] | None:
    """The elements as numbers, complex ones as pairs; None where they have no norm."""
    names = {FLOAT: "f", INT: "i", UNSIGNED: "u"}
    if kind in names and elem_bytes <= 8 and (kind, elem_bytes) != (FLOAT, 1):
        return raw.view(f"{names[kind]}{elem_bytes}")
    if kind == BFLOAT16 and elem_bytes == 2:
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == COMPLEX and elem_bytes in (8, 16):
        return raw.view(f"f{elem_bytes // 2}")
    return None


def _summary(raw: NDArray[np.uint8], elem_bytes: int, kind: int) -> tuple[float, int]:
    elements = raw.reshape(-1, elem_bytes)
    flags = CONSTANT if bool((elements == elements[0]).all()) else 0
    numbers = _numbers(raw, elem_bytes, kind)
    if numbers is None:
        return float("nan"), flags | (0 if raw.any() else ZERO)
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs, squares of large doubles
        if not np.isfinite(numbers).all():
            flags |= NONFINITE
        if not (numbers != 0).any():
            flags |= ZERO
        wide = numbers.astype(np.float64)
        return float(np.sqrt((wide * wide).sum())), flags


def fingerprint_buffer(
    address: int,
    nbytes: int,
    elem_bytes: int,
    kind: int,
    start: int = 0,
    rows: int = 1,
    row_stride: int = 0,
    summary: bool = True,
    *,
    simd: str | None = None,
) -> tuple[int, float, int]:
    """Fingerprint, norm and flags of memory; `start` and `row_stride` count 32-bit words, `simd` is ignored."""
    if elem_bytes not in (1, 2, 4, 8, 16):
        raise ValueError(f"elem_bytes is {elem_bytes}, expected 1, 2, 4, 8 or 16")
    if nbytes == 0:
        return 0, 0.0, ZERO | CONSTANT
    elem_words = max(1, elem_bytes // 4)
    if not address or rows < 1 or nbytes % (rows * elem_bytes) or start % elem_words or row_stride % elem_words:
        raise ValueError(f"{nbytes} bytes, start {start}, row_stride {row_stride} are not {rows} rows of whole elements")
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    words = raw.view(f"u{min(elem_bytes, 4)}").reshape(rows, -1)
    fp = sum(hash_words(row, start + r * row_stride) for r, row in enumerate(words)) % (1 << 64)
    norm, flags = _summary(raw, elem_bytes, kind) if summary else (float("nan"), 0)
    return fp, norm, flags


def fingerprint_many(
    addresses: ArrayLike,
    nbytes: ArrayLike,
    elem_bytes: ArrayLike,
    kinds: ArrayLike,
    summary: bool = True,
    *,
    simd: str | None = None,
) -> tuple[NDArray[np.uint64], NDArray[np.float64], NDArray[np.uint8]]:
    """Fingerprints, norms and flags of many contiguous buffers."""
    columns = [np.asarray(c).tolist() for c in (addresses, nbytes, elem_bytes, kinds)]
    if len({len(c) for c in columns}) > 1:
        raise ValueError("addresses, nbytes, elem_bytes and kinds differ in length")
    rows = [fingerprint_buffer(a, n, e, k, summary=summary) for a, n, e, k in zip(*columns)]
    return (
        np.array([r[0] for r in rows], dtype=np.uint64),
        np.array([r[1] for r in rows], dtype=np.float64),
        np.array([r[2] for r in rows], dtype=np.uint8),
    )


def fingerprint_backend() -> str:
    """`python`: tells a test, and `proctor doctor`, that the native module is not in use."""
    return "python"


def fingerprint_backends() -> list[str]:
    """What `simd` may name: nothing here."""
    return []
