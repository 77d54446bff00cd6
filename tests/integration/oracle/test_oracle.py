"""The oracle on real programs: parallel training in the usual ways against one device, from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from helpers.oracle.oracle_programs import Configuration
from helpers.warm import python

from proctor.cli import main

ROOT = Path(__file__).resolve().parents[3]
BUGS = ROOT.parent / "shared" / "bugs"
TENSOR = {"name", "kind", "rel_err", "tolerance", "ratio", "verdict", "ranks", "module", "source"}

Reference = Callable[..., Path]
Compare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Records a reference once, whoever asks for it."""
    folder, known = tmp_path_factory.mktemp("references"), {}

    def record(*command: object, samples: int = 1) -> Path:
        key = tuple(map(str, command))
        if key not in known:
            known[key] = folder / str(len(known))
            assert main(["oracle", "record", "-o", str(known[key]), "--samples", str(samples), "--timeout", "240", "--", *key]) == 0
        return known[key]

    return record


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Records a candidate and compares it; exit code and the JSON report."""

    def run(reference: Path, *command: object) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "candidate"
        assert main(["oracle", "record", "-o", str(out), "--overwrite", "--timeout", "240", "--", *map(str, command)]) == 0
        capsys.readouterr()
        code = main(["oracle", "compare", str(reference), str(out), "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_tensor_parallel_by_dtensor(reference: Reference, compare: Compare) -> None:
    right = Configuration("parallel_gpt", ("--mesh", "tp=2"))
    wrong = Configuration("parallel_gpt", ("--mesh", "tp=2", "--bug", "output_not_reduced"))
    trusted = reference(*right.reference.command(interpreter=python()))
    code, report = compare(trusted, *right.command(interpreter=python()))
    assert (code, report["verdict"]) == (0, "equivalent"), report["reason"]
    assert report["checked"] > 150 and not report["unchecked"]
    _contract(report)
    code, report = compare(trusted, *wrong.command(interpreter=python()))
    assert (code, report["verdict"]) == (1, "different")
    assert any(re.fullmatch(b, named(report)[0]) for b in right.blamed("output_not_reduced")), named(report)
    _contract(report)


@pytest.mark.slow
def test_a_pipeline_can_be_the_reference(tmp_path: Path, compare: Compare) -> None:
    trusted = tmp_path / "pipeline"
    pipeline = Configuration("pipeline_gpt", ("--nprocs", "2", "--schedule", "1f1b"))
    recording = ["oracle", "record", "-o", str(trusted), "--as-reference", "--samples", "1", "--timeout", "240", "--"]
    assert main([*recording, *map(str, pipeline.command(interpreter=python()))]) == 0
    code, report = compare(trusted, *pipeline.reference.command(interpreter=python()))
    assert (code, report["verdict"]) == (0, "equivalent"), report["reason"]
    assert report["checked"] > 100 and not report["unchecked"]


def named(report: dict[str, Any]) -> list[str]:
    """Names that a reader sees first: the first wrong tensor, then replicas that differ."""
    return [*([report["first"]["name"]] if report["first"] else []), *(r["name"] for r in report["replicas"])]


def _contract(report: dict[str, Any]) -> None:
    """What scripts rely on (docs/oracle.md)."""
    assert report["schema"] == 1
    assert {"verdict", "first", "tensors", "replicas"} <= report.keys()
    assert (report["first"] is None) == (report["verdict"] != "different")
    assert all(t.keys() >= TENSOR for t in report["tensors"])
    assert all(isinstance(t["ranks"], list) and t["kind"] and isinstance(t["name"], str) for t in report["tensors"])
    assert all(r.keys() >= {"name", "kind", "axis", "ranks"} for r in report["replicas"])


PARALLEL = [
    Configuration("parallel_gpt", ("--mesh", "dp=2")),
    Configuration("parallel_gpt", ("--mesh", "dp=2", "--zero")),
    Configuration("parallel_gpt", ("--mesh", "dp=2", "--fsdp"), ("--microbatches", "2")),
    Configuration("parallel_gpt", ("--mesh", "dp=2,tp=2", "--fsdp", "--sp"), ("--recompute",)),
    Configuration("parallel_gpt", ("--mesh", "tp=2", "--sp"), ("--dtype", "bfloat16")),
    Configuration("pipeline_gpt", ("--nprocs", "2", "--schedule", "1f1b"), ("--tied", "--microbatches", "2")),
    Configuration("pipeline_gpt", ("--nprocs", "2", "--schedule", "interleaved")),
    Configuration("switch_moe", ("--nprocs", "2")),
    Configuration("parallel_gpt", ("--mesh", "dp=2,tp=2", "--fsdp", "--sp"), ("--recompute", "--dropout", "0.1")),
]


@pytest.mark.slow
@pytest.mark.parametrize("right", PARALLEL, ids=lambda c: " ".join((c.program, *c.arguments)))
def test_parallel_runs_are_equivalent(right: Configuration, reference: Reference, compare: Compare) -> None:
    code, report = compare(reference(*right.reference.command()), *right.command())
    assert (code, report["verdict"]) == (0, "equivalent"), (report["reason"], report["first"])
    gradients = [t for t in report["tensors"] if t["kind"] == "main_grad"]
    assert gradients and all(t["verdict"] in ("ok", "warn", "no-power") for t in gradients)


@pytest.mark.slow
def test_a_transformers_llama_by_its_own_plan(reference: Reference, compare: Compare) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    right = Configuration("llama_tp", ("--nprocs", "2"))
    code, report = compare(reference(*right.reference.command()), *right.command())
    assert (code, report["verdict"]) == (0, "equivalent"), (report["reason"], report["first"])


@pytest.mark.slow
def test_the_example_of_the_guide(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "tiny-llama")
    guide = (ROOT / "docs" / "oracle.md").read_text()
    (tmp_path / "test_llama.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_llama.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout


MISTAKES = [
    (Configuration("parallel_gpt", ("--mesh", "dp=2")), "parameter_ignored_by_ddp"),
    (Configuration("parallel_gpt", ("--mesh", "dp=2", "--zero")), "zero_not_broadcast"),
    (Configuration("parallel_gpt", ("--mesh", "tp=2", "--sp")), "norm_grads_not_reduced"),
    (Configuration("parallel_gpt", ("--mesh", "dp=2,tp=2", "--fsdp", "--sp"), ("--recompute",)), "stale_recompute_input"),
    (Configuration("parallel_gpt", ("--mesh", "tp=2"), ("--dropout", "0.1")), "masks_of_each_rank"),
    (Configuration("parallel_gpt", ("--mesh", "dp=2"), ("--dropout", "0.1")), "dropout_missing"),
    (Configuration("switch_moe", ("--nprocs", "2"), ("--dtype", "bfloat16")), "least_likely_experts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("right", "mistake"), MISTAKES, ids=lambda c: str(c))
def test_mistakes_are_named(right: Configuration, mistake: str, reference: Reference, compare: Compare) -> None:
    code, report = compare(reference(*right.reference.command()), *right.command("--bug", mistake))
    assert (code, report["verdict"]) == (1, "different"), report["reason"]
    assert any(re.fullmatch(b, n) for b in right.blamed(mistake) for n in named(report)), named(report)


@pytest.mark.slow
@pytest.mark.skipif(not BUGS.is_dir(), reason="the published cases are not beside the repository")
@pytest.mark.parametrize("case", ["tt-01-tp-embedding-mask", "tt-06-sp-router-not-synced"])
def test_published_cases(case: str, reference: Reference, compare: Compare) -> None:
    about = json.loads((BUGS / case / "case.json").read_text())
    names = [re.escape(n).replace(re.escape("<i>"), r"\d+").replace(r"\.\*", ".*") for n in about["acceptable_names"]]
    trusted = reference(sys.executable, BUGS / case / "reference.py")
    code, report = compare(trusted, sys.executable, BUGS / case / "fixed.py")
    assert (code, report["verdict"]) == (0, "equivalent"), (report["reason"], report["first"])
    code, report = compare(trusted, sys.executable, BUGS / case / "buggy.py")
    assert (code, report["verdict"]) == (1, "different")
    assert any(re.search(n, found) for n in names for found in named(report)), named(report)


@pytest.mark.slow
def test_run_does_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.small_net import program

    monkeypatch.chdir(tmp_path)
    python, script, *_ = program(tmp_path)
    arguments = ["oracle", "run", "--reference", f"{python} {script} 0 1 1", "--samples", "1", "--no-localise"]
    assert main([*arguments, "--candidate", f"{python} {script} 0 3 1", "--html", "report.html"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERENT" in text and "gradient scale 3" in text
    assert "gradient scale 3" in (tmp_path / "report.html").read_text()
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / ".proctor-oracle").glob("reference-*/oracle.json")}
    assert main([*arguments, "--candidate", f"{python} {script} 0 1 1"]) == 0
    assert made == {p: p.stat().st_mtime_ns for p in (tmp_path / ".proctor-oracle").glob("reference-*/oracle.json")}
