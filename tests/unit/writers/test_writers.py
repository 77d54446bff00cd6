"""Curves and incidents in TensorBoard, W&B and MLflow, with the real libraries and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run as write_records

from proctor.cli import main
from proctor.errors import ConfigError, UsageError
from proctor.invariants.invariant import Severity, Support
from proctor.invariants.verdict import CheckResult, Incident, Violation
from proctor.verify.report import Report
from proctor.verify.report.formats import json_ as jsonout
from proctor.verify.writers import Target, _background, kinds, open_writer, parse
from proctor.verify.writers._background import Background
from proctor.verify.writers._guarded import Guarded, told
from proctor.verify.writers._run import write_run


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: Exception | None = None

    def series(self, step: int, values: Mapping[str, float]) -> None:
        self._keep("series", step, dict(values))

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        self._keep("incident", step, title, text, severity)

    def close(self) -> None:
        self._keep("close")

    def _keep(self, *call: Any) -> None:
        if self.fail is not None:
            raise self.fail
        self.calls.append(call)


def incident(title: str = "Gradients were not cleared", step: int | None = 3) -> Incident:
    violation = Violation(
        id="a1b2c3", code="PR103", relation="sequence", severity=Severity.ERROR, text="gradients are cleared between updates",
        when="always", step=step, rank=0, function="torch.optim.Optimizer.step", variable="", module="", source="train.py:7",
        expected="cleared", seen="not cleared", support=Support(passed=10, excluded=0, runs=2, programs=1), confirmed=True,
        advice="Look for zero_grad.", places=[(step, 0)],
    )
    return Incident(title, step, [violation])


CURVES = {"loss": ([0, 1, 2, 4], [4.0, 3.0, float("nan"), 1.0]), "step_time": ([0, 1], [8.0, 9.0])}


def test_a_run_is_written_in_the_order_of_its_steps() -> None:
    writer = Kept()
    assert write_run(writer, CURVES, [incident(step=2), incident("Unplaced", None)]) == 6
    assert [(call[0], call[1]) for call in writer.calls] == [
        ("incident", None), ("series", 0), ("series", 1), ("series", 2), ("incident", 2), ("series", 4),
    ]
    assert writer.calls[1][2] == {"loss": 4.0, "step_time": 8.0}


def test_the_first_error_is_said_once_and_ends_the_writer() -> None:
    writer, said = Kept(), []
    guarded = Guarded("wandb", writer, said.append)
    guarded.series(0, {"loss": 1.0})
    writer.fail = OSError("gone: https://me:hunter2@host/api?api_key=abcdef")
    for step in range(1, 4):
        guarded.series(step, {"loss": 1.0})
    guarded.incident(4, "t", "x", Severity.ERROR)
    guarded.close()
    assert len(said) == 1 and said[0].startswith("wandb is not written to any more: OSError: gone")
    assert "hunter2" not in said[0] and "abcdef" not in said[0]
    assert len(writer.calls) == 1 and guarded.trouble


@pytest.mark.parametrize("text", ["password='pw1'", "Authorization: pw1", "token=pw1&x", "secret_key: \"pw1\""])
def test_an_error_is_told_without_its_secrets(text: str) -> None:
    assert "pw1" not in told(ValueError(text))


def test_a_slow_tool_does_not_hold_up_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_background, "QUEUED", 10)
    monkeypatch.setattr(_background, "CLOSING_S", 0.2)
    release, said = threading.Event(), []

    class Stuck(Kept):
        def series(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(20)

    writer = Background(Target("tensorboard", "x"), "run", said.append, lambda target, run: Stuck())
    began = time.monotonic()
    for step in range(1000):
        writer.series(step, {"loss": 1.0})
    assert time.monotonic() - began < 1
    assert writer.dropped >= 989
    writer.close()
    assert said == ["tensorboard did not take all of its records in 0.2 s"]
    release.set()


def test_a_background_writer_writes_everything_before_it_closes() -> None:
    kept = Kept()
    writer = Background(Target("tensorboard", "x"), "run", pytest.fail, lambda target, run: kept)
    for step in range(100):
        writer.series(step, {"loss": float(step)})
    writer.incident(5, "title", "text", Severity.WARNING)
    writer.close()
    assert [call[1] for call in kept.calls[:100]] == list(range(100))
    assert [call[0] for call in kept.calls[100:]] == ["incident", "close"]
    assert writer.dropped == 0


def test_a_target_that_cannot_be_opened_is_said_once() -> None:
    said: list[str] = []

    def refuse(target: Target, run: str) -> Kept:
        raise ConfigError("mlflow: connection refused")

    writer = Background(Target("mlflow", "http://localhost:1"), "run", said.append, refuse)
    for step in range(5):
        writer.series(step, {})
    writer.close()
    assert said == ["PR-E400  mlflow: connection refused"]


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "neptune:x", ":x", ""])
def test_a_target_that_names_nothing_is_bad_usage(text: str) -> None:
    with pytest.raises(UsageError, match="names no place"):
        parse(text)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in kinds().items():
        with monkeypatch.context() as patch:
            top = {"tensorboard": "tensorboard.compat.proto.event_pb2", "wandb": "wandb", "mlflow": "mlflow.tracking", "otel": "opentelemetry.sdk.trace"}[name]
            patch.setitem(sys.modules, top, None)
            with pytest.raises(ConfigError) as caught:
                open_writer(Target(name, "http://somewhere:4318" if name == "otel" else "somewhere"), "run")
            assert caught.value.hint == f"pip install {module.PACKAGE}"


def events(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = accumulators.EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    loaded.Reload()
    return loaded


def test_tensorboard_reads_what_was_written_and_no_markup_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = open_writer(parse(f"tensorboard:{tmp_path}"), "run")
    write_run(writer, CURVES, [incident("<img src=x onerror=alert(1)> ![](http://evil)")])
    writer.close()
    read = events(tmp_path / "run")
    assert [(e.step, e.value) for e in read.Scalars("proctor/loss")][:2] == [(0, 4.0), (1, 3.0)]
    (shown,) = read.Tensors("proctor/incidents")
    text = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 3 and "gradients are cleared" in text
    assert all(line.startswith("    ") for line in text.splitlines())


def test_mlflow_keeps_metrics_and_incidents_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "mlruns"
    writer = open_writer(parse(f"mlflow:{store}"), "night run")
    write_run(writer, {**CURVES, "odd:name<b>": ([0], [1.0])}, [incident(), incident("Second", 4)])
    writer.close()

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("proctor").experiment_id])
    assert run.info.run_name == "night run" and run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "proctor/loss")][:2] == [(0, 4.0), (1, 3.0)]
    assert run.data.tags["proctor.incidents"] == "2"
    assert run.data.tags["proctor.first_incident"] == "Gradients were not cleared"
    artifact = Path(run.info.artifact_uri.removeprefix("file://")) / "incidents" / "1.txt"
    assert "gradients are cleared between updates" in artifact.read_text()


WANDB = """
import sys
from proctor.verify.writers import open_writer, parse
from proctor.invariants.invariant import Severity
writer = open_writer(parse("wandb:team/proctor-test"), "night run")
for step in range(3):
    writer.series(step, {"loss": 4.0 - step})
writer.incident(2, "A title of more than sixty-three characters, which is all that W&B takes", "text", Severity.CRITICAL)
writer.close()
assert "torch" not in sys.modules
"""


def test_wandb_offline_needs_no_network_and_keeps_no_secrets(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path), "MY_TOKEN": "hunter2"}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, "--password=hunter2"], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=400, check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = kept.read_bytes()
    assert b"proctor/loss" in data and b"A title of more than" in data and b"hunter2" not in data


def recorded(folder: Path) -> Path:
    """A run of four steps with a loss."""
    rows = [
        {"fn": "torch.optim.Optimizer.step", "step": step, "user_meta": json.dumps({"loss": 4.0 - step}), "site": "train.py:7"}
        for step in range(4)
    ]
    write_records(folder, processes=[{"rank": 0, "world": 1, "calls": rows}])
    return folder


def result_of(*incidents: Incident) -> str:
    result = CheckResult("run", list(incidents), 10, 0, 0, [], 4, 1)
    return jsonout.render(Report(result=result, exit_code=1))


def test_export_writes_the_curves_and_the_last_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    run = recorded(tmp_path / "run")
    board = tmp_path / "board"
    assert main(["export", str(run), "--to", f"tensorboard:{board}"]) == 0
    assert "no check result" in capsys.readouterr().err
    assert events(board / "run").Scalars("proctor/loss")[3].value == 1.0

    (run / "check.json").write_text(result_of(incident()))
    assert main(["export", str(run), "--to", f"tensorboard:{board}", "--name", "second"]) == 0
    assert "1 incident" in capsys.readouterr().err
    assert len(events(board / "second").Tensors("proctor/incidents")) == 1


def test_export_of_nothing_or_to_nowhere_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for arguments in (
        [str(run), "--to", "tensorboard"],
        [str(tmp_path / "none"), "--to", f"tensorboard:{tmp_path}"],
        [str(run), "--to", f"tensorboard:{tmp_path}/file"],
        [str(run), "--to", f"tensorboard:{tmp_path}", "--result", str(tmp_path / "file")],
    ):
        capsys.readouterr()
        assert main(["export", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("proctor: PR-E") and "Traceback" not in error
