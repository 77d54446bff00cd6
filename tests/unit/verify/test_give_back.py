"""`verify/memory.py`: pages that are free between those in use go back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from proctor.verify.memory import give_back

MIB = 1 << 20


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="an allocator that has no such call")
def test_holes_between_blocks_in_use_are_given_back() -> None:
    blocks = [np.ones(30_000, dtype=np.uint8) for _ in range(4_000)]  # below the size that has a mapping of its own
    kept = blocks[::20]
    blocks.clear()
    before = resident()
    give_back()
    assert resident() < before - 60 * MIB
    assert all((block == 1).all() for block in kept)
