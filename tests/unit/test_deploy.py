"""What teams take over as files: read by the real programs where they are installed, and true to what Proctor exports and takes."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from proctor.cli import watch
from proctor.verify.metrics import PrometheusMetrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
METRIC = re.compile(r"\bproctor_[a-z_]+\b")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of the series of a verifier."""
    text = generate_latest(PrometheusMetrics("job", ["PR101"]).registry).decode()
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("path", sorted([*PROMETHEUS.glob("*.yml"), *DEPLOY.glob("grafana/*.json")]), ids=lambda p: p.name)
def test_every_metric_that_is_asked_for_is_exported(path: Path, exported: set[str]) -> None:
    asked = set(METRIC.findall(path.read_text()))
    assert asked or path.name == "prometheus.yml"
    assert asked <= exported


@pytest.mark.parametrize("words", [["check", "config", "prometheus.yml"], ["check", "rules", "proctor.rules.yml"], ["test", "rules", "proctor.rules.test.yml"]])
def test_prometheus_takes_them(words: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian: apt install prometheus)")
    done = subprocess.run([promtool, *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_the_dashboard_is_whole(tmp_path: Path) -> None:
    board = json.loads((DEPLOY / "grafana" / "proctor.json").read_text())
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels) >= 8
    taken = [(p["gridPos"]["x"] + x, p["gridPos"]["y"] + y) for p in panels for x in range(p["gridPos"]["w"]) for y in range(p["gridPos"]["h"])]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24
    variables = {f"${v['name']}" for v in board["templating"]["list"]} | {"$__rate_interval"}
    expressions = [t["expr"] for p in panels for t in p["targets"]]
    assert set(re.findall(r"\$\w+", " ".join(expressions))) <= variables
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    plain = [text.replace("$__rate_interval", "5m").replace("$job", "x") for text in expressions]
    rules = {"groups": [{"name": "a", "rules": [{"record": f"a:{i}", "expr": text} for i, text in enumerate(plain)]}]}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    done = subprocess.run([promtool, "check", "rules", str(tmp_path / "rules.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(plain)} rules found" in done.stdout, done.stdout + done.stderr


def test_kubernetes_takes_the_manifests() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="of the dev extra")
    import yaml

    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "training.yaml").read_text()))
    assert [one["kind"] for one in found] == ["Service", "Job"]
    for one in found:
        assert validator.validate(one, "1.30", strict=True) == "1.30"
    with pytest.raises(validator.ValidationError):
        validator.validate({**found[1], "spec": {**found[1]["spec"], "completion": 2}}, "1.30", strict=True)


@pytest.mark.parametrize("path", [DEPLOY / "kubernetes" / "training.yaml", DEPLOY / "slurm" / "train.sbatch"], ids=lambda p: p.name)
def test_the_options_of_watch_are_there(path: Path) -> None:
    parser = argparse.ArgumentParser()
    watch.prepare(parser)
    text = re.sub(r"torchrun.*|(?m:^\s*#.*)|--master-\S+|--nn\S+|--node-rank", "", path.read_text())
    asked = {o for o in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if o not in ("--from-literal", "--kill-on-bad-exit")}
    assert {"--budget", "--token-file", "--listen", "--verifier"} <= asked
    assert asked <= set(parser._option_string_actions)


def test_the_slurm_script_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(DEPLOY / "slurm" / "train.sbatch")], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("ci/*")), ids=lambda p: p.name)
def test_examples_of_ci_are_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="of the dev extra")
    assert isinstance(yaml.safe_load(path.read_text()), dict)
