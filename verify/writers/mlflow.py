"""MLflow: a run in the experiment `proctor` of a tracking server or folder, through the client of `mlflow-skinny`.

Incidents are artifacts `incidents/<n>.txt`, and tags that the list of runs shows: how many, the first, the worst.
Credentials are MLflow's own settings (`MLFLOW_TRACKING_TOKEN`, …).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from proctor.invariants.invariant import Severity
from proctor.verify.writers import PREFIX, Writer, library

KIND: Final = "mlflow"
TARGET: Final = "URI|DIR"
PACKAGE: Final = "mlflow-skinny"

EXPERIMENT: Final = "proctor"
_BATCH: Final = 500  # metrics of one request; the server takes 1,000
_WAIT_S: Final = 10.0  # before a batch that is not full is sent
_TAG: Final = 500  # characters


class MLflow:
    """One run."""

    def __init__(self, uri: str, name: str) -> None:
        self._client: Any = library("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._metric: Any = library("mlflow.entities").Metric
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(EXPERIMENT)
        self._run = str(self._client.create_run(experiment, run_name=name).info.run_id)
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self._incidents = 0
        self._worst: Severity | None = None

    def series(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting.extend(self._metric(_metric_name(name), number, now, step) for name, number in values.items())
        if len(self._waiting) >= _BATCH or time.monotonic() - self._sent > _WAIT_S:
            self._flush()

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        self._incidents += 1
        where = "" if step is None else f"step {step}\n"
        self._client.log_text(self._run, f"{severity.value}: {title}\n{where}{text}\n", f"incidents/{self._incidents}.txt")
        if self._incidents == 1:
            self._client.set_tag(self._run, "proctor.first_incident", title[:_TAG])
        if self._worst is None or severity.level > self._worst.level:
            self._worst = severity
            self._client.set_tag(self._run, "proctor.worst", severity.value)
        self._client.set_tag(self._run, "proctor.incidents", str(self._incidents))

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run)

    def _flush(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            self._client.log_batch(self._run, metrics=batch)


def open_target(target: str, run: str) -> Writer:
    """Begin a run at a tracking URI, or in a folder."""
    uri = target if re.match(r"[a-zA-Z][\w+.-]*:", target) else Path(target).resolve().as_uri()
    if uri.startswith("file:"):
        # MLflow 3 takes folders only from those who say that they mean it; naming one here says so.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return MLflow(uri, run)


def _metric_name(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", PREFIX + name)[:250]
