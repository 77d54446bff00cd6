"""An integration says which versions it was tried with; what an installed version lacks is noted, and a rule about its absence is unknown."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
from helpers.warm import python

from proctor.instrument import integrations
from proctor.instrument.patch import catalog

FAKE = """
class Accelerator:
    def backward(self, loss):
        loss.backward()
Accelerator.__module__ = "accelerate.accelerator"
"""
PROGRAM = """
import torch
from accelerate.accelerator import Accelerator

net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    Accelerator().backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("name", [info.name for info in pkgutil.iter_modules(integrations.__path__)])
def test_each_says_what_it_observes_and_what_it_was_tried_with(name: str) -> None:
    library = importlib.import_module(f"{integrations.__name__}.{name}")
    oldest, newest = library.TRIED
    assert library.LIBRARY and library.POINTS and catalog._numbers(oldest) <= catalog._numbers(newest)


@pytest.mark.parametrize(
    ("found", "said"),
    [("4.57.1", False), ("4.57.9", False), ("5.24.0", False), ("5.99.0.dev0", False), ("4.56.2", True), ("6.0.0rc1", True), ("3.0", True)],
)
def test_a_version_beyond_the_tried_ones_is_said(found: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "version", lambda _: found)
    assert catalog.untried("transformers", ("4.57.1", "5.24.0")) == (found if said else "")


def test_what_a_module_lacks_is_named() -> None:
    module = ModuleType("library.training")
    exec("class Trainer:\n    def fit(self): ...\n    __module__ = 'library.training'\ndef save(): ...", vars(module))
    lacks = catalog.lacking(module, "library", {"Trainer": ("fit", "test"), "save": (), "load": ()})
    assert lacks == ["library.Trainer.test", "library.load"]


def test_a_run_with_an_unknown_version_says_both(tmp_path: Path) -> None:
    for folder in ("accelerate", "accelerate-99.0.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    (tmp_path / "accelerate" / "accelerator.py").write_text(FAKE)
    (tmp_path / "accelerate-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99.0\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [python(), "-m", "proctor.cli", "record", "-o", "run", "--", python(), "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    (told,) = (json.loads(path.read_text()) for path in (tmp_path / "run" / "procs").glob("*/process.json"))
    assert [note for note in told["notes"] if "accelerate 99.0 was not tried" in note]
    assert "accelerate.Accelerator.prepare" in told["unobserved"] and "accelerate.Accelerator.backward" not in told["unobserved"]
