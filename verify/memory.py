"""Memory that nothing uses goes back to the system, since a verifier runs for as long as its job."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pyarrow as pa

_libc = ctypes.CDLL(None)


def give_back() -> None:
    """Hand back pages that are free between those in use: windows come and go in all sizes, and allocators keep what they leave
    for hours, so that a verifier that holds no more than before would be seen to grow. Takes about a millisecond.
    """
    pa.default_memory_pool().release_unused()
    if hasattr(_libc, "malloc_trim"):  # of glibc
        _libc.malloc_trim(0)


class _NoPandas:
    """A finder that finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)


def forgo_pandas() -> None:
    """Let Arrow take it that there is no pandas: it imports it, for half a second, at the first array that is made of a list.

    Of this process only, which makes no frame of pandas from Arrow's arrays. Others may still import it.
    """
    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])  # it looks once and remembers
    finally:
        sys.meta_path.remove(finder)
