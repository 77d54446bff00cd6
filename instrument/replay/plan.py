"""What the process that starts a re-execution and those inside it say to each other. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from proctor.invariants.capsule import Capsule

PLAN: Final = "replay.json"


class Plan(msgspec.Struct, frozen=True):
    """What every rank of a re-execution reads.

    Args:
        capsules: folder by rank.
        out: folder for outcomes.
    """

    capsules: dict[int, str]
    out: str


class Outcome(msgspec.Struct, frozen=True):
    """What one rank of a re-execution found.

    Args:
        trouble: why it says nothing; empty when it does.
        step: the step as it went this time.
    """

    rank: int
    trouble: tuple[str, ...] = ()
    step: Capsule | None = None


def outcome_file(out: Path, rank: int) -> Path:
    """Where a rank writes its outcome."""
    return out / f"rank{rank}.json"
