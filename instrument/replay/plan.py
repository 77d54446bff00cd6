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
        origin: look for where the first NaN or infinity comes from.
    """

    capsules: dict[int, str]
    out: str
    origin: bool = False


class Link(msgspec.Struct, frozen=True):
    """An operation that gave a value that is not finite.

    Args:
        number: of the operation in the step.
        operation: `aten.log.default`.
        line: `file:line` of the program; of a backward that of the forward which it belongs to.
        module: that was running, by its name in the model.
        backward: it belongs to a backward.
        inputs: what it was given: dtype, shape, smallest and largest finite value, how many NaN and infinities.
        gave: the same of what it gave.
    """

    number: int
    operation: str
    line: str
    module: str
    backward: bool
    inputs: tuple[str, ...]
    gave: str


class Origin(msgspec.Struct, frozen=True):
    """Where the first value that is not finite comes from.

    Args:
        end: what ended not finite: `loss`, `gradient fc.weight`, `parameter fc.weight`; "": nothing did.
        chain: operations from the origin to there; empty: it was not finite before the step.
        outside: what came into the step not finite: `parameter fc.weight`, `an input`; "": it was made in the step.
    """

    end: str = ""
    chain: tuple[Link, ...] = ()
    outside: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What one rank of a re-execution found.

    Args:
        trouble: why it says nothing; empty when it does.
        step: the step as it went this time.
        origin: where it was asked for.
    """

    rank: int
    trouble: tuple[str, ...] = ()
    step: Capsule | None = None
    origin: Origin | None = None


def outcome_file(out: Path, rank: int) -> Path:
    """Where a rank writes its outcome."""
    return out / f"rank{rank}.json"
