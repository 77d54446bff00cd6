"""What is told to watched processes, and what they tell beside outcomes. Data; no torch."""

from __future__ import annotations

from typing import Final

import msgspec

from proctor.oracle.selfcheck.adapters import Axis

DIGESTS: Final = "digests.jsonl"
SAVED: Final = "saved.jsonl"
WAITS: Final = "waits"  # all is checked, and the program is expected to save
FAILED: Final = "failed"  # a process could not be watched any longer: why


class CheckConfig(msgspec.Struct, frozen=True):
    """What a watched process is told.

    Attributes:
        folder: where it writes, absolute.
        step: update at which relations are checked, counted from 0, of each optimizer.
        only: relations to check; () all.
        skip: relations not to check.
        digest: write digests of the first steps instead (`program/determinism.py`).
        rows: with digests of each row of a batch, and without dropout (`program/ranks.py`).
        seed: of the generators at the start; `None` leaves them alone.
        budget_s: for all relations together.
    """

    folder: str
    agent: str = "self"
    step: int = 2
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    digest: bool = False
    rows: bool = False
    seed: int | None = None
    budget_s: float = 900.0


class Timing(msgspec.Struct, frozen=True):
    """What one process measured, in seconds.

    Attributes:
        step_s: of the program's last step before the check.
        models_s: all relations of models.
        all_s: all relations.
        forked: whether copies of the process were made.
    """

    step_s: float
    models_s: float
    all_s: float
    forked: bool


class Facts(msgspec.Struct, frozen=True):
    """What a rank says of one update, for relations that look at several ranks.

    Attributes:
        rank, world: of the process.
        items: by line of a loss, its items and weights.
        axes: of configurations that the program made (`selfcheck/adapters`).
        groups: whether anything that it loaded makes process groups.
    """

    rank: int
    world: int
    items: list[tuple[str, str, int, int, float]]
    axes: list[Axis] = []
    groups: bool = False


class Line(msgspec.Struct, frozen=True):
    """One digest.

    Attributes:
        digest: of the bits.
        kind: `parameter`, `input`, `result`, `gradient` or `update`; with `rows` also `drew` (a forward drew random numbers) and `norm` (of all gradients, before they are clipped).
        name: of the module or the parameter, with a path in it.
        step: update, counted from 0.
        source: `file:line` of the program.
        rows: of an input, the digests of its rows along its first axis and along its second.
        size: norm of a gradient.
    """

    digest: str
    kind: str
    name: str
    step: int
    source: str
    rows: list[list[str]] = []
    size: float = 0.0
