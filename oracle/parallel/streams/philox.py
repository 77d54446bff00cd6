"""Philox4x32-10: random words that follow from a key and a position, with no state in between.

Position i of a key has word i % 4 of the block with counter i // 4, so a shard of any beginning and length costs what it
holds. Constants and rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the layout of the
counter (low, high, domain, 0) is that of torch's `_philox_*` operations. The kernels are `native/philox.h`, in C++ or numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from proctor import native

Words = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]


def words(key: int, starts: Longs, length: int, each: int = 1, domain: int = 0) -> Words:
    """Random words of stretches of positions.

    Args:
        key: 64 bits.
        starts: [N] first position of each stretch.
        length: of every stretch.
        each: words for one position: 1, 2 or 4. Position i has words `each`·i … `each`·i + `each` − 1 of the stream.
        domain: 32 bits; other domains of a key are other streams.

    Returns:
        [N, length, each].
    """
    out = np.empty((len(starts), length, each), np.uint32)
    native.philox_words(key, np.ascontiguousarray(starts), length, each, domain, out)
    return out


def unit(key: int, starts: Longs, length: int) -> Singles:
    """[N, length] uniform in [0, 1), 24 random bits each; see `words`."""
    out = np.empty((len(starts), length), np.float32)
    native.philox_unit(key, np.ascontiguousarray(starts), length, out)
    return out


def normal(key: int, starts: Longs, length: int) -> Singles:
    """[N, length] standard normal by Box and Muller, where two neighbours share a pair of words; see `words`."""
    out = np.empty((len(starts), length), np.float32)
    native.philox_normal(key, np.ascontiguousarray(starts), length, out)
    return out
