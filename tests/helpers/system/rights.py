"""Root as other users are: bound to the permissions of files."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522  # of the kernel's structures for capabilities, linux/capability.h
_DAC = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def bound_to_permissions() -> Iterator[None]:
    """Within, this thread and what it starts may read and write only what permissions allow, also where it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice

    def call(function: str) -> None:
        if getattr(libc, function)(header, words):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    effective = words[0]
    words[0] = effective & ~_DAC
    call("capset")
    try:
        yield
    finally:
        words[0] = effective
        call("capset")
