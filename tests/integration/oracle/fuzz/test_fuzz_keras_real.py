"""Keras on TensorFlow, where there is an interpreter that has both: `PROCTOR_KERAS_PYTHON=/path/to/venv/bin/python` (docs/fuzz.md, Keras)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from proctor.cli import main
from proctor.oracle.fuzz.keras import catalogue
from proctor.oracle.fuzz.keras.client import Server
from proctor.oracle.fuzz.keras.runner import KerasRunner
from proctor.oracle.fuzz.running.outcome import Outcome
from proctor.oracle.fuzz.search.attribute import minimal
from proctor.oracle.fuzz.search.findings import Finding, signature
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.spec import Scenario

PYTHON = os.environ.get("PROCTOR_KERAS_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PROCTOR_KERAS_PYTHON names no interpreter that has keras and tensorflow")
MODEL = {"layers": ["dense", "layernorm"]}
TWO = {"world": 2, "wrapper": "mirrored"}


def test_healthy_settings_agree_and_a_planted_bug_is_found_with_a_script_that_runs_alone(tmp_path: Path) -> None:
    """Planted: the loss is not divided by the number of replicas, whose gradients are summed."""
    plant = "from keras.src.losses import loss\nloss.scale_loss_for_distribution = lambda value: value\n"
    undo = "import importlib\nfrom keras.src.losses import loss\nif 'plain' in vars(loss): loss.scale_loss_for_distribution = loss.plain\n"
    with Server(PYTHON, 300.0) as server:
        found = server.catalogue()
        assert {"SGD", "Adam"} <= set(found.classes()) and "learning_rate" in found.optimizers["SGD"]
        if found.versions == catalogue.shipped().versions:
            assert found == catalogue.shipped()
        healthy = [{}, TWO, {**TWO, "keras_optimizer": "Adam", "keras_save": "keras"}, {**TWO, "keras_call": "run"}]
        outcomes = KerasRunner(server).run_all([Scenario("keras_chain", {**MODEL}, {"steps": 2}, {**s}) for s in healthy])
        assert [o.verdict for o in outcomes] == ["ok"] * len(healthy), outcomes
        raised = KerasRunner(server, undo + "raise ValueError('mine')").run(Scenario("keras_chain", {**MODEL}, {}, {**TWO}))
        assert raised.verdict == "crash" and raised.symptom is not None and raised.symptom.way == "mine"
        runner = KerasRunner(server, "from keras.src.losses import loss\nloss.plain = vars(loss).get('plain', loss.scale_loss_for_distribution)\n" + plant)
        scenario = Scenario("keras_chain", {**MODEL}, {"steps": 1}, {**TWO, "keras_steps": 2})
        wrong = runner.run(scenario)
        assert wrong.verdict == "inconsistent", wrong
        least = minimal(scenario.setting, lambda s: runner.run(scenario.with_setting(s)).failed)
        assert least == TWO
    finding = _finding(scenario.with_setting(least), wrong)
    script = tmp_path / "script.py"
    text = script_of(finding, "keras")
    for more, code in (("", 0), (plant, 1)):  # Keras as it is has no such bug
        script.write_text(text.replace("FOLDER =", f"{more}FOLDER ="))
        done = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == code and "off by" in done.stdout, (done.stdout, done.stderr[-2000:])


def _finding(scenario: Scenario, outcome: Outcome) -> Finding:
    assert outcome.symptom is not None
    return Finding(signature(outcome.symptom, scenario.setting), scenario, outcome, scenario.setting, (), scenario)


def test_a_campaign_ends_with_a_report_and_can_be_resumed(tmp_path: Path) -> None:
    out = tmp_path / "campaign"
    assert main(["oracle", "fuzz", "--library", "keras", "--python", PYTHON, "--axes", "keras_feed=dataset", "--rows", "1", "--pairs", "1", "--budget", "3m", "--seed", "3", "-o", str(out)]) in (0, 1)
    first = json.loads((out / "report.json").read_text())
    assert first["pairs"] == 1 and first["asked"]["python"] == PYTHON and set(first["asked"]["versions"]) == {"keras", "tensorflow", "torch"}
    assert main(["oracle", "fuzz", "--resume", str(out), "--pairs", "2", "--budget", "3m"]) in (0, 1)
    assert json.loads((out / "report.json").read_text())["pairs"] == 2
