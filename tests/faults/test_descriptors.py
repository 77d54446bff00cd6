"""A program that closes every descriptor, as daemons do, keeps its files to itself, and its trace goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from proctor.invariants.trace import Trace

PROGRAM = """
import os, sys, time, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
for _ in range(8):
    step()
os.closerange(int(sys.argv[2]), 4096)
kept, wrote = [], []
for i in range(14):  # written to the end of the job, so that whoever has a number of ours hits one of them
    kept.append(open(f"{sys.argv[1]}/checkpoint{i}", "w+b", buffering=0))
    wrote.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    kept[-1].write(wrote[-1])
    step()
for file, content in zip(kept, wrote):
    file.write(b"END")
    file.close()
    if open(file.name, "rb").read() != content + b"END":
        os._exit(5)
loss = model(torch.ones(1, 4)).sum().item()
open(f"{sys.argv[1]}/loss", "w").write(repr(loss))
"""
STEPS = 22


@pytest.mark.parametrize(("how", "lowest"), [("record", 3), pytest.param("watch", 0, marks=pytest.mark.slow)])
def test_a_daemon_s_checkpoints_are_its_own(tmp_path: Path, how: str, lowest: int) -> None:
    (tmp_path / "daemon.py").write_text(PROGRAM)
    program = [sys.executable, str(tmp_path / "daemon.py"), str(tmp_path), str(lowest)]
    done = subprocess.run(
        [sys.executable, "-m", "proctor.cli", how, "-o", str(tmp_path / "run"), "--", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300, check=False,
    )
    assert done.returncode == 0, done.stderr  # 5: a checkpoint does not hold what was written
    trace = Trace.load([tmp_path / "run"])
    assert trace.steps == STEPS
    assert trace.processes[0].finished
    assert not trace.processes[0].dropped
    assert not [note for note in trace.notes if "damaged" in note]
