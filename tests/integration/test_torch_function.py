"""Functions of torch, given what has a `__torch_function__` or is no tensor at all: what the program's code sees and gets is the same recorded as bare.

`PROGRAM` calls each function that torch hands to a `__torch_function__`. It notes whether that is given the very function that was called, what is asked of the objects, and what comes
back or is raised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")

PROGRAM = '''
import inspect, json, sys, warnings
import torch
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name

warnings.simplefilter("ignore")
torch.manual_seed(0)
log, called = [], [None]


class Duck:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        log.append("given what was called" if func is called[0] else f"given another {func.__name__}")
        return cls()
    def __getattr__(self, name): log.append("asked for " + name); raise AttributeError(name)
    def __len__(self): log.append("len"); return 2
    def __bool__(self): log.append("bool"); return True
    def __eq__(self, other): log.append("eq"); return NotImplemented
    __hash__ = object.__hash__
    def __iter__(self): log.append("iter"); return iter([1, 2])
    def __getitem__(self, key): log.append("item"); raise IndexError(key)
    def __float__(self): log.append("float"); return 1.0
    def __index__(self): log.append("index"); return 1


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ != "__get__":  # what a tensor is may be asked for
            log.append(func.__name__ + " as called" * (func is called[0]))
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(dict):
    def __getitem__(self, key): log.append("item"); return super().__getitem__(key)


functions = {}
for key, like in get_testing_overrides().items():
    name = (resolve_name(key) or "__").replace("torch.functional.", "torch.")
    found = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if callable(found) and "__" not in name and name != "torch.Tensor.register_hook":
        functions[name] = found, sum(p.default is p.empty and p.kind in (0, 1) for p in inspect.signature(like).parameters.values())

kinds = {"duck": Duck, "sub": lambda: torch.ones(2, 3).as_subclass(Sub), "none": lambda: None, "text": lambda: "text", "ducks": lambda: [Duck(), Duck()], "dict": lambda: Named(a=1)}
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for name, (function, n) in sorted(functions.items()) if step == 1 else ():
        for kind, make in kinds.items():
            log.clear()
            called[0] = function
            try:
                said = type(function(*[make() for _ in range(n)])).__name__
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            print(json.dumps([name, kind, said, list(log)]))
    optimizer.step()
    print(json.dumps(["loss", step, loss.item().hex(), []]))
'''


def ran(folder: Path, before: list[str]) -> tuple[dict[tuple[str, str], object], str]:
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*before, python(), "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {(name, str(kind)): rest for name, kind, *rest in lines}, done.stderr


def test_what_has_a_torch_function_sees_and_gets_the_same(tmp_path: Path) -> None:
    bare, _ = ran(tmp_path / "bare", [])
    recorded, told = ran(tmp_path / "recorded", [sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--"])
    assert Counter(note for _, seen in bare.values() for note in seen)["given what was called"] > 700  # of two kinds
    assert {at: (bare[at], recorded.get(at)) for at in bare if recorded.get(at) != bare[at]} == {}
    assert " is off after " not in told
