"""Every example trains: it exits cleanly, prints its RESULT line, and its loss falls within a few steps.

The healthy examples are what the shipped packs are learned from, so a broken one would silently weaken the packs.
Of `techniques/` and `libraries/` a short form runs; `PROCTOR_SLOW=1 pytest` trains each with its defaults (4 minutes).
"""
import ast
import json
import math
import os
import runpy
import sys
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.warm import python

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

TECHNIQUES = sorted((EXAMPLES / "techniques").glob("*.py"))
LIBRARIES = sorted((EXAMPLES / "libraries").glob("*.py"))
KINDS = {"vision", "language", "generative", "tabular", "rl", "signal"}
RANKS = [path for path in TECHNIQUES if '"--nprocs"' in path.read_text()]  # start ranks of their own
ONE_PROCESS = [path for path in TECHNIQUES if path not in RANKS]
SAMPLED_RANKS = ("local_sgd", "zero_redundancy")  # the rest is like the examples that test_bit_identical.py records
NO_FALLING_LOSS = {"dqn_replay"}  # the temporal-difference error grows with the values
MISSING_LIBRARY = 77


def result_of(stdout: str) -> dict:
    lines = [line for line in stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, stdout[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def run(script: Path, *arguments: str) -> dict:
    """Run one script in a process of its own and return its RESULT."""
    # A launcher's variables would make a multi-rank script believe that it is already one of the ranks.
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    done = run_ranks([python(), str(script), *arguments], env, 800)
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


def stem(path: Path) -> str:
    return path.stem


def test_every_program_says_its_class_and_is_described():
    readme = (EXAMPLES / "README.md").read_text()
    programs = [EXAMPLES / f"{name}.py" for name in ARGUMENTS] + TECHNIQUES + LIBRARIES
    assert len({path.stem for path in programs}) == len(programs)
    for path in programs:
        last = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[-1]
        assert last.removeprefix("Class: ") in KINDS, path
        assert f"| `{path.name}` |" in readme, path


@pytest.fixture(scope="module")
def technique_digests(tmp_path_factory):
    """RESULT and random states of every single-process technique, bare and recorded."""
    helper = [python(), str(ROOT / "tests" / "helpers" / "run_examples.py"), "6", *map(str, ONE_PROCESS)]
    out = tmp_path_factory.mktemp("runs") / "techniques"
    watch = [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--"]

    def digests(command: list[str]) -> dict[str, tuple[list[str], str]]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = run_ranks(command, env, 800)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(x.removeprefix("DIGEST ")) for x in done.stdout.splitlines() if x.startswith("DIGEST ")]
        return {name: (result, state) for name, result, state in rows}

    return digests(helper), digests([*watch, *helper])


@pytest.mark.slow
@pytest.mark.parametrize("script", ONE_PROCESS, ids=stem)
def test_technique_runs_and_recording_changes_nothing(script, technique_digests):
    bare, recorded = technique_digests
    assert bare[script.stem] == recorded[script.stem]
    result = result_of("\n".join(bare[script.stem][0]))
    assert len(result["losses"]) == 6
    assert all(math.isfinite(loss) for loss in result["losses"]) and result["param_sum"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED_RANKS)
def test_technique_on_many_ranks_runs(name):
    assert len(run(EXAMPLES / "techniques" / f"{name}.py", "--iters", "6")["losses"]) == 6


@pytest.mark.parametrize("script", LIBRARIES, ids=stem)
def test_without_its_library_a_program_says_so(script, monkeypatch, capsys):
    for library in ("transformers", "accelerate", "lightning"):
        monkeypatch.setitem(sys.modules, library, None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # a program may set them; they are as before when it ends
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    message = capsys.readouterr().err
    assert stopped.value.code == MISSING_LIBRARY
    assert message.startswith(f"{script.stem} needs ") and message.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", TECHNIQUES + LIBRARIES, ids=stem)
def test_program_trains_with_its_defaults(script):
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    done = run_ranks([python(), str(script)], env, 800)
    if done.returncode == MISSING_LIBRARY:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    losses = result_of(done.stdout)["losses"]
    quarter = max(1, len(losses) // 4)
    assert script.stem in NO_FALLING_LOSS or mean(losses[-quarter:]) < mean(losses[:quarter])
