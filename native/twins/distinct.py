"""`distinct.h` in numpy: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def first_seen(values: NDArray[np.uint64]) -> bytes:
    """Of each value the place of the first that is equal, as the bytes of uint32 numbers.

    Args:
        values: uint64, shape (n,), contiguous.

    Raises:
        ValueError: another type or shape.
    """
    if values.dtype != np.uint64 or values.ndim != 1 or not values.flags.c_contiguous:
        raise ValueError("a plain array of uint64 is needed")
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return bytes(first.astype(np.uint32)[inverse].data)
