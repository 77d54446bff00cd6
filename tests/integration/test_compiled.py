"""A compiled model is observed like the model: same bits, no probe dies, every parameter has its name and is judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("torch")
import proctor
from proctor.cli.check import examine

PROGRAM = """
import hashlib, os, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.norm(self.body(x)))

def compiled(model):
    return torch.compile(model, backend="eager")

torch.manual_seed(0)
model = Net()
if sys.argv[1] == "whole":
    wrapped = compiled(model)
else:
    model.body = compiled(model.body)
    model.head.compile(backend="eager")
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
    wrapped = nn.parallel.DistributedDataParallel(compiled(model))
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
for i in range(5):
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    loss = nn.functional.cross_entropy(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("LOSS", loss.item().hex())
for p in model.parameters():
    print("HASH", hashlib.sha256(p.detach().numpy().tobytes()).hexdigest())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
NAMES = {
    "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"
}  # fmt: skip


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize("how", ["whole", pytest.param("parts and ddp", marks=pytest.mark.slow)])
def test_a_compiled_model_is_observed_and_stays_the_same(how: str, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PROGRAM)
    bare = run(str(script), how, str(tmp_path / "store"))
    assert bare.returncode == 0, bare.stderr[-3000:]
    watched = run(
        "-m", "proctor.cli", "record", "-o", str(out), "--", sys.executable, str(script), how, str(tmp_path / "store2")
    )
    assert watched.returncode == 0, watched.stderr[-3000:]
    assert watched.stdout == bare.stdout
    assert "is off" not in watched.stderr
    opened = proctor.open_run(str(out))
    assert opened.trace.steps == 5
    held = opened.states.filter((pl.col("role") == "parameter") & (pl.col("attr") == "data"))
    assert set(held["name"]) == NAMES
    assert set(held["model"]) == {"__main__.Net"}
    assert set(held.filter(pl.col("step") == 4)["name"]) == NAMES
    assert {n.removesuffix(".data") for n in opened.states.filter(pl.col("role") == "buffer")["name"]} >= {"norm.running_mean"}
    report = examine(out, [], fail_on="error")
    assert report.exit_code == 0, report.result
