"""Decisions from the command line: a router whose choice falls out otherwise near a tie, and masks that are replayed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers.oracle.oracle_programs import Configuration

from proctor.cli import main

PROGRAM = """
import sys, torch
from torch import nn

class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2, bias=False), nn.Linear(8, 16)

    def forward(self, x):
        scores = self.gate(x) + torch.tensor([0.0, float(sys.argv[1])])
        weights, chosen = scores.softmax(-1).max(-1)
        return self.experts(x).unflatten(-1, (2, 8))[torch.arange(len(x)), chosen] * weights[:, None]

torch.manual_seed(0)
model = Router()
with torch.no_grad():
    model.gate.weight[1] = model.gate.weight[0] * (1 - 1e-7)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 8)).square().mean().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_a_candidate_that_chose_otherwise_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script, reference, candidate = tmp_path / "train.py", str(tmp_path / "reference"), str(tmp_path / "candidate")
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), "3e-7"]
    assert main(["oracle", "record", "-o", reference, "--samples", "1", "--", *command[:2], "0"]) == 0
    assert main(["oracle", "record", "-o", candidate, "--", *command]) == 0
    capsys.readouterr()
    assert main(["oracle", "compare", reference, candidate, "--format", "json"]) == 3
    assert "max.0 of the model fell out otherwise" in json.loads(capsys.readouterr().out)["reason"]
    assert main(["oracle", "compare", reference, candidate, "--format", "json", "--command", " ".join(command)]) == 0
    report = json.loads(capsys.readouterr().out)
    (choice,) = (t for t in report["tensors"] if t["kind"] == "choice")
    assert choice["verdict"] in ("ok", "warn") and choice["rel_err"] > 0
    assert main(["oracle", "compare", reference, candidate]) == 0  # the second run is kept with the recording


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "code"), [((), 0), (("--bug", "dropout_probability"), 1)])
def test_masks_are_replayed(
    bug: tuple[str, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    right = Configuration("parallel_gpt", ("--mesh", "tp=2"), ("--dropout", "0.1"))
    options = ["--samples", "1", "--dropout", "replay", "--no-localise", "--format", "json"]
    reference, candidate = " ".join(right.reference.command()), " ".join(right.command(*bug))
    assert main(["oracle", "run", "--reference", reference, "--candidate", candidate, *options]) == code
    report = json.loads(capsys.readouterr().out)
    assert any(t["kind"] == "dropped" for t in report["tensors"])
    assert "masks of 2 modules" in report["unchecked"][0]  # inside attention
    assert not bug or report["first"]["name"] == "layers.1.attention"
