"""A compiled model is observed like the model: same bits, no probe dies, every parameter has its name and is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from helpers.warm import python

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
BROKEN = """
import sys, torch
from torch import nn

def some(x):
    return x[x.sum(1) > 0].sum(0)

class Base(nn.Module):
    def pick(self, x, scale=1.0):
        y = self.a(x) * scale
        kept = y.sum(1) > 0
        return y[kept], kept

class Net(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    @staticmethod
    def part(x):
        return some(x) * 2
    @classmethod
    def of(cls, x):
        return cls.part(x) + 1
    def pick(self, x, *, scale=0.5):
        return super().pick(x, scale)
    def again(self, x):
        return Net.pick(self, x)[0].sum(0)
    def forward(self, x):
        y, kept = self.pick(x, scale=0.1)
        return y.sum() + (self.again(x) + some(x) + self.part(self.a(x)) + self.of(x)).square().mean()

torch.manual_seed(0)
model = Net()
wrapped = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(5):
    loss = wrapped(torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i == 1:
        late = torch.optim.SGD(model.parameters(), lr=1e-3)  # functions of the program are looked for again
    print("LOSS", loss.item().hex())
"""
GUARDED = """
import torch
from torch import nn

def outer(k):
    def made(self, x):
        return x * k
    return made

class Other:
    def go(self, x, s=2.0):
        return x * s

class Base(nn.Module):
    def over(self, x):
        return x + 1
    def added(self, x, by=1.0):
        return x + by

First = Base
torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1e-3)  # functions of the program are looked for

class Base(First):
    def added(self, x, by=2.0):
        return x * by

torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1e-3)  # again, for a class of the same name

class Net(Base):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 8), nn.Linear(8, 2), Other()
    made = outer(3.0)
    def mix(self, x, scale=2.0):
        return x * scale
    def named(self, x, *, scale=2.0):
        return x * scale
    def over(self, x):
        return super().over(x)
    def plain(self, x):
        return x * 2
    @classmethod
    def of(cls, x, s=0.5):
        return x * s
    @staticmethod
    def part(x, s=0.5):
        return x * s
    def forward(self, x):
        y = self.made(self.mix(self.named(self.over(self.plain(First.added(self, self.added(self.a(x))))))))
        return self.b(torch.relu(self.o.go(self.of(self.part(y)))))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
wrapped = torch.compile(model, backend="eager")
for i in range(4):
    if i == 2:
        class Late(nn.Module):
            def forward(self, x):
                return self.twice(x)
            def twice(self, x, by=2.0):
                return x * by
        late = torch.compile(Late(), backend="eager")
        torch.optim.SGD(model.parameters(), lr=1e-3)  # functions of the program are looked for again
    loss = wrapped(torch.randn(8, 4)).square().mean()
    loss = loss if i < 2 else late(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("LOSS", loss.item().hex())
"""
LATE = """
import sys, torch
from torch import nn, compile
from proctor.instrument.attach import attach

class Net(nn.Linear):
    def mix(self, x, scale=2.0):
        return x * scale
    def forward(self, x):
        return self.mix(super().forward(x))

if sys.argv[1] == "before":
    attach(sys.argv[2])
model = compile(Net(4, 4), backend="eager")
if sys.argv[1] == "behind":
    model(torch.ones(1, 4))
    attach(sys.argv[2])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""
NAMES = {
    "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"
}  # fmt: skip


def run(*command: str, interpreter: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter, *command], capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize("how", ["whole", pytest.param("parts and ddp", marks=pytest.mark.slow)])
def test_a_compiled_model_is_observed_and_stays_the_same(how: str, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PROGRAM)
    bare = run(str(script), how, str(tmp_path / "store"), interpreter=python())
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


def test_methods_with_breaks_of_the_graph_keep_their_instance(tmp_path: Path) -> None:
    """Behind a break Dynamo calls what it could not follow, and compiles what runs there: methods find their instance, and hooks are left alone."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(BROKEN)
    bare = run(str(script), interpreter=python())
    watched = run("-m", "proctor.cli", "record", "-o", str(out), "--", sys.executable, str(script))
    assert bare.returncode == watched.returncode == 0, watched.stderr[-3000:]
    assert watched.stdout == bare.stdout
    assert "is off" not in watched.stderr and "Dynamo" not in watched.stderr
    trace = proctor.open_run(str(out)).trace
    assert trace.steps == 5 and "__main__.Net.again" in trace.functions
    assert not any("resume_at" in name for name in trace.functions), "what Dynamo makes of a function is none of the program's"


def test_methods_that_dynamo_guards_as_functions_are_left_alone(tmp_path: Path) -> None:
    """Default arguments, `super()` and other variables of a function around: Dynamo's guards of them take a function of Python alone."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(GUARDED)
    bare = run(str(script), interpreter=python())
    watched = run("-m", "proctor.cli", "record", "-o", str(out), "--", sys.executable, str(script))
    assert bare.returncode == watched.returncode == 0, watched.stderr[-3000:]
    assert watched.stdout == bare.stdout
    (facts,) = (json.loads(path.read_text()) for path in out.glob("procs/*/process.json"))
    unobserved = {name.removeprefix("__main__.") for name in facts["unobserved"]}
    assert unobserved >= {"Base.added", "Net.mix", "Net.named", "Net.over", "Net.made", "Net.of", "Other.go", "Late.twice"}
    assert not unobserved & {"Net.plain", "Net.part"}


@pytest.mark.parametrize("when", ["before", "behind"])
def test_attached_late_methods_of_a_compiled_model_are_left_alone(when: str, tmp_path: Path) -> None:
    """The program has bound `compile` to a name of its own, or has compiled already."""
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(LATE)
    done = run(str(script), when, str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert proctor.open_run(str(out)).trace.steps == 3
