"""`rebuilt` of `course`: the rate that a file holds is the rate of the next update, whatever is built behind the load (pytorch 119168)."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")
from proctor.invariants.relations.course.resuming import rebuilt
from proctor.invariants.trace import Trace

PROGRAM = """
    from torch.optim.lr_scheduler import LinearLR
    def build():
        model = nn.Linear(6, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def schedule(optimizer):
        return LinearLR(optimizer, 0.5, total_iters=8)
    def train(model, optimizer, scheduler, n):
        for _ in range(n):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            scheduler.step()
    model, optimizer = build()
    scheduler = schedule(optimizer)
    train(model, optimizer, scheduler, 3)
    saved = optimizer.state_dict(), scheduler.state_dict()
    model, optimizer = build()
    if BUG in ("built_last", "fine_tunes", "steps_first"):
        optimizer.load_state_dict(saved[0])
        scheduler = schedule(optimizer)
        if BUG != "fine_tunes":
            scheduler.load_state_dict(saved[1])
        if BUG == "steps_first":
            scheduler.step()
    else:
        scheduler = schedule(optimizer)
        scheduler.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
    train(model, optimizer, scheduler, 3)
"""
RIGHT = ["loaded_last", "fine_tunes", "steps_first"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resuming")
    record(folder, {"resumes": PROGRAM}, [("resumes", how, 0, 8, how) for how in (*RIGHT, "built_last")])
    return folder


@pytest.mark.parametrize("how", RIGHT)
def test_a_rate_that_was_loaded_last_or_replaced_on_purpose_is_right(runs: Path, how: str) -> None:
    found = rebuilt(Trace.load([runs / f"resumes-{how}"]))
    assert found.height
    assert found["passed"].all()


def test_a_scheduler_that_is_built_behind_the_load_is_found_at_the_first_update(runs: Path) -> None:
    found = rebuilt(Trace.load([runs / "resumes-built_last"])).filter(~pl.col("passed"))
    assert found["step"].to_list() == [3]
    assert "a scheduler was built behind the load" in found["_seen"][0]
