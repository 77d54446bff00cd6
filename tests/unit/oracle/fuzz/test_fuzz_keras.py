"""Keras without Keras: what is drawn, texts and scripts, the protocol with servers that are not real, verdicts."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

import msgspec
import pytest

from proctor.cli import main
from proctor.errors import OracleError
from proctor.oracle.fuzz.axes import all_axes, why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.keras import catalogue
from proctor.oracle.fuzz.keras.client import Server
from proctor.oracle.fuzz.keras.program import replicas, text
from proctor.oracle.fuzz.keras.runner import KerasRunner
from proctor.oracle.fuzz.models import all_templates
from proctor.oracle.fuzz.program import reference_of
from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.cover import Cover
from proctor.oracle.fuzz.search.findings import Finding, library_of, needs, signature
from proctor.oracle.fuzz.search.shrink import steps
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.space import Point, drawn
from proctor.oracle.fuzz.spec import INPUT, Scenario, decode, encode

OURS = [a for a in all_axes() if a.library == "keras"]
TWO: Point = {"world": 2, "wrapper": "mirrored"}


@pytest.mark.parametrize("axis", OURS, ids=lambda a: a.name)
def test_every_value_of_every_axis_writes_a_program_of_its_own(axis: object) -> None:
    from proctor.oracle.fuzz.axes import Axis

    assert isinstance(axis, Axis)
    bases: tuple[Point, ...] = ({}, {"world": 1}, {"keras_save": "keras"}, *({"keras_optimizer": o} for o in catalogue.current().classes()))
    for value in axis.choice.values[1:]:
        found = next((s for base in bases if not why_invalid(s := {**TWO, **base, axis.name: value}, frozenset({"keras"}))), None)
        assert found is not None, (axis.name, value)
        with_, without = (text(Scenario("keras_chain", {}, {}, s)) for s in (found, {k: v for k, v in found.items() if k != axis.name}))
        compile(with_, "here", "exec")
        assert with_ != without


@pytest.mark.parametrize("template", all_templates("keras"), ids=lambda t: t.name)
def test_models_compile_and_survive_json(template: object) -> None:
    from proctor.oracle.fuzz.models import Template

    assert isinstance(template, Template)
    rng, cover = random.Random(3), Cover(("keras",))
    for _ in range(40):
        scenario = Scenario(template.name, drawn(template.choices, rng), drawn(INPUT, rng))
        traits = facts(scenario)
        setting = cover.row(rng, traits)
        assert not why_invalid(setting, traits) and all(name in ("world", "wrapper") or name.startswith("keras_") for name in setting)
        scenario = scenario.with_setting(setting)
        assert decode(encode(scenario), "here") == scenario
        compile(text(scenario), "here", "exec")
        compile(text(reference_of(scenario), permuted=1), "here", "exec")
        assert replicas(reference_of(scenario)) == 0 and "MirroredStrategy" not in text(reference_of(scenario))
    assert all(s.template.startswith("keras_") for s in steps(Scenario(template.name, {}, {"steps": 1})))


def test_values_are_read_off_the_library() -> None:
    known = catalogue.shipped()
    assert {"SGD", "Adam", "Muon", "ScheduleFreeAdamW"} <= set(known.classes()) and "LossScaleOptimizer" not in known.classes()
    assert known.has("Adam", "amsgrad=True") and not known.has("SGD", "amsgrad=True") and not any("clipnorm" in o for o in known.options())
    optimizer = next(a for a in OURS if a.name == "keras_optimizer")
    try:
        catalogue.use(msgspec.structs.replace(known, optimizers={**known.optimizers, "Brandnew": {"learning_rate": 0.1, "zeal": 4.0}}))
        assert "Brandnew" in optimizer.choice.values
        assert not why_invalid({"keras_optimizer": "Brandnew", "keras_option": "zeal=2.0"}, frozenset({"keras"}))
    finally:
        catalogue.use(known)
    assert "Brandnew" not in optimizer.choice.values


def a_finding(setting: Point, first: Difference | None) -> Finding:
    symptom = Symptom("inconsistent", "parameter") if first is not None else Symptom("crash", "ValueError", "oh", "keras/x.py:f")
    scenario = Scenario("keras_chain", {"layers": ["syncbatchnorm", "dense"]}, {}, setting)
    return Finding(signature(symptom, setting), scenario, Outcome(symptom.verdict, symptom, "it fails", first), setting, (), scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["value", "shape", "missing", "crash"])
@pytest.mark.parametrize("setting", [TWO, {**TWO, "keras_save": "keras", "keras_before": "3", "keras_weighted": "zeros", "keras_optimizer": "Adam"}, {"keras_steps": 2, "keras_call": "train_on_batch"}])
def test_a_script_is_short_and_needs_keras_alone(way: str, setting: Point) -> None:
    numbers = {"candidate": "1", "reference": "2"} if way == "value" else {"way": "shape [2] for [1]" if way == "shape" else "the candidate has none"}
    finding = a_finding(setting, None if way == "crash" else Difference(0, "parameter", "0 l0/gamma", 1.0, 1e-8, 1.0, **numbers))
    assert library_of(finding) == "keras" and needs(finding.scenario) == ("keras syncbatchnorm", "synchronized")
    script = script_of(finding, "keras 3.15.1, tensorflow 2.21.0")
    tree = ast.parse(script)
    imported = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {"os", "sys", "tempfile", "keras", "numpy", "tensorflow"} and len(script.splitlines()) < 60
    assert ("MirroredStrategy" in script) == ("world" in setting)


FAKE = """
import base64, json, os, signal, struct, sys, time
def one(kind, name, *values):
    return {"kind": kind, "name": name, "dtype": "float64", "shape": [len(values)], "data": base64.b64encode(struct.pack(f"{len(values)}d", *values)).decode()}
print("noise on stderr", file=sys.stderr)
for line in sys.stdin:
    task = json.loads(line)
    permuted = "np.argsort" in task.get("text", "")
    value = (1.0 + 1e-3 * permuted * NOISE) if task.get("world", 0) == 0 else CANDIDATE
    if task.get("ask"):
        answer = {"raised": {"type": "ModuleNotFoundError", "message": "No module named 'keras'", "where": "", "traceback": ""}}
    else:
        answer = {"seen": [one("output", "loss", 0.5), one("parameter", "0 l0/kernel", value, 2.0)], "apart": APART}
    if task.get("world", 0): exec(THEN)
    sys.stdout.write(json.dumps(answer) + chr(10)); sys.stdout.flush()
"""
SCENARIO = Scenario("keras_chain", {}, {}, TWO)


def a_server(then: str = "", candidate: float = 1.0, noise: int = 0, apart: str = "", timeout_s: float = 30.0) -> Server:
    head = f"THEN, CANDIDATE, NOISE, APART = {then!r}, {candidate}, {noise}, {apart!r}\n"
    return Server(sys.executable, timeout_s, head + FAKE)


def test_values_are_compared_with_the_references_and_its_noise() -> None:
    for candidate, noise, apart, wanted in ((1.0, 0, "", "ok"), (1.01, 0, "", "inconsistent"), (1.01, 1, "", "ok"), (1.5, 1, "", "inconsistent"), (1.0, 0, "l0/kernel", "replicas")):
        with a_server(candidate=candidate, noise=noise, apart=apart) as server:
            outcome = KerasRunner(server).run(SCENARIO)
            assert outcome.verdict == wanted, (candidate, noise, outcome)
            assert wanted != "inconsistent" or outcome.why.startswith("parameter 0 l0/kernel of step 0")
    with a_server(candidate=1.01) as server:
        batchnorm = Scenario("keras_chain", {"local": True}, {}, TWO)
        assert KerasRunner(server).run(batchnorm).verdict == "different"
        assert KerasRunner(server).run(SCENARIO.with_setting({**TWO, "keras_before": "2"})).verdict == "no program"


def test_what_is_raised_and_how_a_process_dies_are_verdicts_and_the_next_one_is_started() -> None:
    raising = "answer = {'raised': {'type': 'ValueError', 'message': 'input 3 is bad', 'where': 'keras/src/x.py:f', 'traceback': 'here'}}"
    with a_server(raising) as server:
        assert KerasRunner(server).run(SCENARIO).symptom == Symptom("crash", "ValueError", "input # is bad", "keras/src/x.py:f")
    with a_server("print('Check failed: 1 == 2', file=sys.stderr, flush=True); os.abort()") as server:
        runner = KerasRunner(server)
        for _ in range(2):
            died = runner.run(SCENARIO)
            assert died.verdict == "crash" and "SIGABRT: Check failed: 1 == 2" in died.why
        assert server.starts == 2 and runner.run(reference_of(SCENARIO)).verdict == "ok" and server.starts == 3
        folder = server.folder
    assert not folder.exists()


def test_a_process_that_does_not_answer_costs_its_time_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_server("import faulthandler; faulthandler.register(signal.SIGUSR1); time.sleep(999)", timeout_s=1.5) as server:
        outcome = KerasRunner(server).run(SCENARIO)
        assert outcome.verdict == "hang" and "server.py" in outcome.trace and server._process is None


def test_an_interpreter_without_keras_or_none_at_all_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with a_server() as server, pytest.raises(OracleError, match="no Keras: No module named 'keras'"):
        server.catalogue()
    monkeypatch.delenv("PROCTOR_KERAS_PYTHON", raising=False)
    for more, wanted in (([], "which interpreter has it"), (["--python", str(tmp_path / "none")], "No such file"), (["--library", "keras,torch", "--python", sys.executable], "keras goes alone")):
        assert main(["oracle", "fuzz", "--library", "keras", *more, "-o", str(tmp_path / "out")]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("proctor:")]
        assert wanted in line
    assert not (tmp_path / "out" / "campaign.json").exists()
