"""Philox4x32-10 by numpy: random words that follow from a key and a position, with no state in between.

Position i of a key has word i % 4 of the block with counter i // 4, so a shard of any beginning and length costs what it
holds. Constants and rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the layout of the
counter (low, high, domain, 0) is that of torch's `_philox_*` operations.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.int64]

_M0: Final = np.uint64(0xD2511F53)
_M1: Final = np.uint64(0xCD9E8D57)
_W0: Final = 0x9E3779B9
_W1: Final = 0xBB67AE85
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10
_CHUNK: Final = 1 << 14  # blocks at a time: what a round reads and writes stays in the second-level cache


def blocks(key: int, counter: Longs, domain: int = 0) -> Words:
    """Random blocks.

    Args:
        key: 64 bits.
        counter: [N] which blocks.
        domain: 32 bits; other domains of a key are other streams.

    Returns:
        [N, 4].
    """
    out = np.empty((len(counter), 4), np.uint32)
    for at in range(0, len(counter), _CHUNK):
        _rounds(key, counter[at : at + _CHUNK].astype(np.uint64), domain, out[at : at + _CHUNK])
    return out


def _rounds(key: int, counter: npt.NDArray[np.uint64], domain: int, out: Words) -> None:
    c0, c1 = counter & _LOW, counter >> _HALF
    c2 = np.full_like(counter, domain)
    c3 = np.zeros_like(counter)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = c0, c1, c2, c3


def words(key: int, starts: Longs, length: int, each: int = 1, domain: int = 0) -> Words:
    """Random words of stretches of positions.

    Args:
        key: 64 bits.
        starts: [N] first position of each stretch.
        length: of every stretch.
        each: words for one position: 1, 2 or 4. Position i has words `each`·i … `each`·i + `each` − 1 of the stream.
        domain: see `blocks`.

    Returns:
        [N, length, each].
    """
    begin, count = starts * each, length * each
    first, skip = begin >> 2, begin & 3
    most = (count + 3 + 3) // 4 if skip.any() else -(-count // 4)
    made = blocks(key, (first[:, None] + np.arange(most)).reshape(-1), domain).reshape(len(starts), most * 4)
    if not skip.any():
        return made[:, :count].reshape(len(starts), length, each)
    if len(starts) == 1:
        return made[:, skip[0] : skip[0] + count].reshape(1, length, each)
    taken = np.take_along_axis(made, skip[:, None] + np.arange(count), 1)
    return taken.reshape(len(starts), length, each)
