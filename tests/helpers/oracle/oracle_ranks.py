"""Ranks of a candidate, recorded one after the other in the test's own process: collectives are what the test makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proctor.oracle import trace
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Verdict
from proctor.oracle.store import Recording


def record_ranks(out: Path, patch: pytest.MonkeyPatch, run: Callable[[int], tuple[Any, Callable[[], object]]], world: int = 2, **options: Any) -> Path:
    """Record ranks.

    Args:
        out: directory of the recording.
        patch: sets what torchrun sets.
        run: gives a rank's model and its training.
    """
    for rank in range(world):
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        model, train = run(rank)
        with trace(model, out, **options):
            train()
    patch.delenv("RANK")
    patch.delenv("WORLD_SIZE")
    return out


def compare_to(reference: Path, candidate: Path, **options: Any) -> Verdict:
    """What the oracle says of two recordings."""
    return Comparison(Recording(reference), Recording(candidate), **options).run()
