"""Public programs through the oracle: a program equals itself, what cannot be recorded is said, and figures are counted by half and reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.forks import Forks
from benchmarks.wild.attempt import FIXED
from benchmarks.wild.manifest import SHIMS, Program
from benchmarks.wild_oracle import Found, attempt, reason_of, table

TRAINS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(9):
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(SHIMS / "sitecustomize.py", dict(os.environ) | FIXED | {"TORCHDYNAMO_DISABLE": "1"}, timeout_s=120, memory_mib=8192)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "state", "why"), [
        (TRAINS, "equivalent", ""), ("print('no model')\n", "not recorded", "without training"), ("import nothing_there\n", "does not run", "exit 1"),
    ],
)  # fmt: skip
def test_a_program_against_itself(tmp_path: Path, forks: Forks, text: str, state: str, why: str) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "a.py").write_text(text)
    program = Program(project="owner+name", half="first", path="a.py", trains="", shims=("limit",), steps=3)
    found = attempt(program, tmp_path / "checkout", tmp_path / "work", forks, 1)
    assert (found.state, why in found.why, found.checked > 5) == (state, True, state == "equivalent")


def test_what_is_counted() -> None:
    found = [
        Found(name="a--x", project="a", half="first", ranks=1, state="equivalent", checked=7),
        Found(name="b--y", project="b", half="second", ranks=1, state="different", checked=5),
        Found(name="b--z", project="b", half="second", ranks=1, state="inconclusive", why="the reference differs from itself: 3 of 9 tensors"),
        Found(name="b--y", project="b", half="second", ranks=2, state="not recorded", why="OracleError: a.py: ended without training a torch module"),
        Found(name="b--w", project="b", half="second", ranks=1, state="does not run"),
    ]
    told = table(found)
    assert "| looked at | 1 and 1 | 1 | 1 | 1 | 0 | 0 | 0 | 7 |" in told
    assert "| held | 1 and 1 | 2 | 1 | 0 | 1 | 1 | 0 | 5 |" in told
    assert "| held | 1 and 2 | 1 | 1 | 0 | 0 | 0 | 1 | 0 |" in told
    assert reason_of(found[2]) == "inconclusive: the reference differs from itself"
    assert reason_of(found[3]) == "not recorded: ended without training a torch module"
