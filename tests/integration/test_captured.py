"""A model that is written down as a graph (`torch.jit.trace`, `torch.fx`, `torch.export`) gives the same graph with Proctor, and no warning of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")
import proctor
from proctor import native

PROGRAM = """
import warnings
import torch
import torch.nn.functional as F
from torch import nn

warnings.simplefilter("error", torch.jit.TracerWarning)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(1, 1, bias=False), nn.Dropout(0.0)
    def forward(self, x, bias: float = 0.0):
        return F.relu(self.drop(self.fc(x))) + torch.full((1,), bias)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
traced = torch.jit.trace(model, torch.rand(1, 1))  # traces twice and compares
print(traced.graph)
print(torch.fx.symbolic_trace(model).code)
print([str(node.target) for node in torch.export.export(model, (torch.ones(2, 1),)).graph.nodes])
for _ in range(2):
    optimizer.zero_grad()
    traced(torch.ones(2, 1)).sum().backward()
    optimizer.step()
print(model.fc.weight.item().hex())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], capture_output=True, text=True, timeout=300, check=False)


def test_a_model_is_captured_as_without_us_and_training_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    bare = run(python(), str(script))
    assert bare.returncode == 0, bare.stderr
    recorded = run(sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--", python(), str(script))
    assert recorded.returncode == 0, recorded.stderr
    if native.ACTIVE == "native":  # the twin's frame stands in the places that a graph names
        assert recorded.stdout == bare.stdout
    else:
        assert recorded.stdout.splitlines()[-1] == bare.stdout.splitlines()[-1]
    assert "off after" not in recorded.stderr, "a probe died"
    calls = proctor.open_run(tmp_path / "run").calls
    assert calls.filter(calls["fn"] == "torch.optim.Optimizer.step").height == 4
