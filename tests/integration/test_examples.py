"""Every example trains: it exits cleanly, prints its RESULT line, and its loss falls within a few steps.

The healthy examples are what the shipped packs are learned from, so a broken one would silently weaken the packs.
"""
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# Steps after which the loss is clearly lower, and arguments that keep the run short. The sizes differ from the defaults
# on purpose: inference needs runs of more than one configuration.
ARGUMENTS = {
    "actor_critic": ["--iters", "40", "--hidden", "24"],
    "autoencoder_workers": ["--iters", "30", "--hidden", "48"],
    "cnn_classifier": ["--iters", "40", "--width", "6", "--samples", "600"],
    "ddp_accumulate_lm": ["--iters", "12", "--hidden", "32"],
    "ddp_classifier": ["--iters", "16", "--width", "40"],
    "finetune_frozen": ["--iters", "30", "--batch-size", "24", "--pretrain-iters", "30"],
    "fsdp2_lm": ["--iters", "10", "--batch-size", "6"],
    "gan": ["--iters", "40", "--hidden", "40"],
    "gcn_citation": ["--iters", "30", "--hidden", "24"],
    "lbfgs_regression": ["--iters", "10", "--hidden", "12"],
    "lora_finetune": ["--iters", "20", "--rank", "2"],
    "lstm_forecast": ["--iters", "20", "--hidden", "16"],
    "seq2seq_attention": ["--iters", "20", "--batch-size", "24"],
    "siamese_contrastive": ["--iters", "40", "--width", "12"],
    "tp_dtensor": ["--iters", "30", "--batch-size", "24"],
    "transformer_lm": ["--iters", "20", "--width", "48"],
    "vae": ["--iters", "20", "--hidden", "8"],
    "vit_amp": ["--iters", "20", "--batch-size", "24"],
}
OWN_PROCESS = {"autoencoder_workers", "ddp_accumulate_lm", "ddp_classifier", "fsdp2_lm", "tp_dtensor"}   # start processes
BUGGY = ("missing_zero_grad", "ddp_stale_rank")


def result_of(stdout: str) -> dict:
    lines = [line for line in stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, stdout[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def run(script: Path, *arguments: str) -> dict:
    """Run one script in a process of its own and return its RESULT."""
    # A launcher's variables would make a multi-rank script believe that it is already one of the ranks.
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return result_of(done.stdout)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run one single-process script in this process: importing torch again costs more than the training."""
    threads = torch.get_num_threads()

    def runner(script: Path, *arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        capsys.readouterr()
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(str(script), run_name="__main__")
        return result_of(capsys.readouterr().out)

    yield runner
    torch.set_num_threads(threads)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_every_example_is_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"demo"} == set(ARGUMENTS)
    assert {path.stem for path in (EXAMPLES / "buggy").glob("*.py")} == set(BUGGY)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_example_trains(name, run_here):
    arguments = ARGUMENTS[name]
    result = (run if name in OWN_PROCESS else run_here)(EXAMPLES / f"{name}.py", *arguments)
    losses = result["losses"]
    assert len(losses) == int(arguments[arguments.index("--iters") + 1])
    assert all(math.isfinite(loss) for loss in losses)
    assert math.isfinite(result["param_sum"]) and result["param_sum"] > 0
    quarter = max(1, len(losses) // 4)
    assert mean(losses[-quarter:]) < mean(losses[:quarter])


def test_same_seed_gives_same_run(run_here):
    script = EXAMPLES / "cnn_classifier.py"
    first = run_here(script, "--iters", "5", "--seed", "3")
    assert first == run_here(script, "--iters", "5", "--seed", "3")
    assert first["losses"] != run_here(script, "--iters", "5", "--seed", "4")["losses"]


@pytest.mark.parametrize(("name", "iters"), [("missing_zero_grad", "40"), ("ddp_stale_rank", "20")])
def test_buggy_program_runs_to_the_end_and_differs_from_its_fixed_form(name, iters, run_here):
    script = EXAMPLES / "buggy" / f"{name}.py"
    runner = run if name.startswith("ddp") else run_here
    buggy, fixed = runner(script, "--iters", iters), runner(script, "--iters", iters, "--fixed")
    assert buggy["losses"][0] == fixed["losses"][0]
    assert buggy["param_sum"] != fixed["param_sum"]
    assert fixed["losses"][-1] < fixed["losses"][0]
