"""The state tracker dies in the middle of a run: the job goes on, and what depends on it is unknown, never violated, never clean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")
from proctor.cli.check import examine

PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 4 and "proctor.instrument.observe.state" in sys.modules:
        def broken(*args): raise ZeroDivisionError("an error of ours")
        sys.modules["proctor.instrument.observe.state"].look = broken
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
print("LOSS", loss.item().hex())
"""


def test_a_state_tracker_that_dies_makes_its_rules_unknown(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bare = subprocess.run([python(), str(script)], capture_output=True, text=True, timeout=250, check=True, env=environment)
    command = [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--", python(), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True, env=environment)
    assert done.stdout == bare.stdout
    assert "probe state is off" in done.stderr
    report = examine(out, [], fail_on="error")
    assert report.trace is not None
    assert report.result is not None
    [process] = report.trace.processes
    assert [what for what, _ in process.blind] == ["states"]
    assert process.blind[0][1] in (3, 4)
    assert report.exit_code == 3
    assert report.result.violations == []
    assert report.result.unknown > 0
    assert report.result.checked > 0
