"""The job's processes come first on the cores that they share with the verifier."""

from __future__ import annotations

import contextlib
import os
from typing import Final

_NICE: Final = 10


def step_back() -> None:
    """Let the caller's thread, and those that it starts from now on, give way to the job.

    They get a small share where cores are full, and one that wakes up waits until the thread that runs has had its turn. Without the
    latter the thread that hears of a flush takes a rank's core several times a step, for some microseconds and the rank's caches.
    """
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox that forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
