"""Memory that nothing uses goes back to the system, since a verifier runs for as long as its job."""

from __future__ import annotations

import ctypes

import pyarrow as pa

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """Hand back pages that are free between those in use: windows come and go in all sizes, and allocators keep what they leave
    for hours, so that a verifier that holds no more than before would be seen to grow. Takes about a millisecond.
    """
    pa.default_memory_pool().release_unused()
    if hasattr(_libc, "malloc_trim"):  # of glibc
        _libc.malloc_trim(0)
