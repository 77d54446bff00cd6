"""Weights & Biases: a run of its own in a project, with incidents as alerts.

Mode, server and API key are W&B's own settings (`WANDB_MODE=offline`, `WANDB_BASE_URL`, `wandb login`); offline needs no
network, and `wandb sync` sends the run later. W&B's records of code, machine, arguments and output stay off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proctor.invariants.invariant import Severity
from proctor.verify.writers import PREFIX, Writer, library

KIND: Final = "wandb"
TARGET: Final = "[ENTITY/]PROJECT"
PACKAGE: Final = "wandb"

_STEP: Final = PREFIX + "step"
_TITLE: Final = 63  # characters; W&B wants fewer than 64
_LEVELS: Final = {Severity.ERROR: "ERROR", Severity.WARNING: "WARN", Severity.INFO: "INFO"}


class WeightsAndBiases:
    """One run."""

    def __init__(self, project: str, entity: str | None, name: str) -> None:
        wandb = library("wandb")
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_disable_stats=True, x_disable_machine_info=True, quiet=True
        )
        self._levels: Any = wandb.AlertLevel
        self._run: Any = wandb.init(
            project=project, entity=entity, name=name, job_type="proctor", settings=settings, reinit="create_new"
        )
        self._run.define_metric(PREFIX + "*", step_metric=_STEP)

    def series(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_STEP: step, **{PREFIX + name: number for name, number in values.items()}})

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        level = getattr(self._levels, _LEVELS.get(severity, "ERROR"))
        where = "" if step is None else f"step {step}\n"
        self._run.alert(title=title[:_TITLE], text=f"{title}\n{where}{text}", level=level, wait_duration=0)

    def close(self) -> None:
        self._run.finish()


def open_target(target: str, run: str) -> Writer:
    """Begin a run in `[ENTITY/]PROJECT`."""
    entity, _, project = target.rpartition("/")
    return WeightsAndBiases(project, entity or None, run)
