"""What a reference is told that does the step of a capsule, and what it says about it. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError

PLAN: Final = "plan.json"
TENSORS: Final = "tensors.safetensors"
REPORT: Final = "replay.json"

Plain = None | bool | int | float | str


class Feed(msgspec.Struct, frozen=True):
    """Values for one place in the arguments of all calls of a kind.

    Args:
        kind: `model`, `loss` or `batch`.
        place: in the arguments, as in a capsule.
        keys: of the tensors, one a call of the job.
        dtype: of all.
    """

    kind: str
    place: str
    keys: tuple[str, ...]
    dtype: str


class Slot(msgspec.Struct, frozen=True):
    """One entry of an optimizer's state: a tensor by key, or a plain value."""

    key: str = ""
    value: Plain = None
    on_cpu: bool = False


class Draw(msgspec.Struct, frozen=True):
    """State of a random generator."""

    name: str
    key: str
    plain: dict[str, Plain] = {}


class ReplayPlan(msgspec.Struct, frozen=True):
    """Everything of a step.

    Args:
        parameters: key of each by name.
        buffers: likewise.
        feeds: data.
        optimizer: class; "" to leave optimizers alone.
        options: of all groups.
        state: by parameter and entry.
        generators: before the step.
        draws: before each outermost call of the model; none where the reference's calls are not the job's.
    """

    parameters: dict[str, str]
    buffers: dict[str, str] = {}
    feeds: tuple[Feed, ...] = ()
    optimizer: str = ""
    options: dict[str, Plain | list[Plain]] = {}
    state: dict[str, dict[str, Slot]] = {}
    generators: tuple[Draw, ...] = ()
    draws: tuple[tuple[Draw, ...], ...] = ()


class Fed(msgspec.Struct):
    """How a feed was used.

    Args:
        used: items of it that were given.
        total: items of it.
        regrouped: calls of the reference are not calls of the job.
    """

    kind: str
    place: str
    used: int = 0
    total: int = 0
    regrouped: bool = False


class ReplayReport(msgspec.Struct):
    """What the reference did with it.

    Args:
        fed: data that it took.
        trouble: why its step is not that of the capsule.
        drew: it drew random numbers between a call of its model and the backward pass.
        updates: parameters whose update began with the job's optimizer state and options.
    """

    fed: list[Fed] = []
    trouble: list[str] = []
    drew: bool = False
    updates: list[str] = []


def read_report(folder: Path) -> ReplayReport:
    """Of one run.

    Raises:
        OracleError: there is none, or it is damaged.
    """
    path = folder / "rank0" / REPORT
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayReport)
    except (OSError, msgspec.MsgspecError) as e:
        raise OracleError(f"{path}: {e}") from None
