"""Secrets on a command line are not kept; what only looks like one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proctor.instrument.record.rundir import create_run
from proctor.invariants.redact import HIDDEN, hides, without_secrets


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "s3cr3t"], ["--api_key=s3cr3t"], ["--password", "s3cr3t"], ["WANDB_API_KEY=s3cr3t"], ["--hf-token", "s3cr3t"],
        ["--token", "s3cr3t"], ["--hub_token=s3cr3t"], ["--wandb.api-key", "s3cr3t"], ["-password", "s3cr3t"],
        ["bash -c 'HF_TOKEN=s3cr3t python train.py --lr 1'"], ["cd x && python t.py --api-key s3cr3t --lr 1"], ['--password "s3cr3t word" -x 1'],
        ["sk-s3cr3ts3cr3ts3cr3ts3cr3t"], ["--note", "it is hf_s3cr3ts3cr3ts3cr3ts3cr3t"], ["--x=ghp_s3cr3ts3cr3ts3cr3ts3cr3t"],
        ["-H", "Authorization: Bearer s3cr3t"], ["-H", "X-Api-Key: s3cr3t"], ["--header=Authorization: Basic s3cr3ts3cr3t=="], ["--url", "https://x/y?lr=1&token=s3cr3t"],
        ["--data", "https://b.blob/x?sv=1&sig=s3cr3t%3D&se=2"], ["--data", "https://x/y?X-Amz-Signature=s3cr3t"], ["--config", '{"api_key": "s3cr3t", "lr": 1}'],
        ["--store", "https://me:s3cr3t@host/x"], ["--aws-secret-access-key", "s3cr3t"], ["trainer.auth_token=s3cr3t"],
    ],
)  # fmt: skip
def test_a_secret_is_hidden(words: list[str]) -> None:
    kept = without_secrets(["python", "train.py", *words, "--lr", "0.1"])
    assert "s3cr3t" not in " ".join(kept)
    assert HIDDEN in " ".join(kept)
    assert hides(kept)
    assert kept[:2] + kept[-2:] == ["python", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize(
    "words",
    [
        ["--num-key-value-heads", "8"], ["--max-tokens", "64"], ["--tokenizer", "gpt2"], ["--token-file", "/run/token"], ["--pad-token", "<pad>"],
        ["--key-dim=64"], ["key=value"], ["--api-key-env", "NAME"], ["--password", "--lr"], ["https://host:80/x"], ["-c", "import torch; key = 1"],
        ["--url", "https://x/y?max_tokens=5&key=3"], ["--note", "ratio: 3"], ["--config", '{"num_key_value_heads": "8", "tokenizer": "x"}'],
        ["-c", "token = tokenizer(text); print(token)"], ["python t.py --max-tokens 64 --api-key-env NAME"], ["task-aware-selection-of-heads-in-models"],
    ],
)  # fmt: skip
def test_other_words_are_kept(words: list[str]) -> None:
    assert without_secrets(words) == words
    assert not hides(words)


def test_a_run_does_not_keep_it(tmp_path: Path) -> None:
    create_run(tmp_path / "run", ["python", "train.py", "--api-key", "s3cr3t"], overwrite=False)
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes()
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["command"] == ["python", "train.py", "--api-key", HIDDEN]


def test_a_run_directory_is_its_owner_s(tmp_path: Path) -> None:
    create_run(tmp_path / "runs" / "run", ["python", "train.py"], overwrite=False)
    assert (tmp_path / "runs" / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs" / "run" / "run.json").stat().st_mode & 0o777 == 0o600
