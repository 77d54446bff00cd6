"""`course`, `steered`: two schedulers of a kind on one optimizer, and none on another one."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

LAW = Hypothesis.of("course", mode="steered", what="updates")
PROGRAM = """
    rates = torch.optim.lr_scheduler
    models = [nn.Linear(6, WIDTH), nn.Linear(6, 1)]
    kinds = (torch.optim.Adam, torch.optim.SGD if BUG == "classes" else torch.optim.Adam)
    optimizers = [kind(m.parameters(), 0.01) for kind, m in zip(kinds, models)]
    held = {"wrong": (0, 0), "classes": (0, 0)}.get(BUG, (0, 1))
    if BUG == "warmup":  # one that is made of two, of one kind; the other optimizer keeps its rate
        first = optimizers[0]
        schedules = [rates.SequentialLR(first, [rates.LinearLR(first, 0.1, 1.0, 3), rates.LinearLR(first, 1.0, 0.1, 20)], [3])]
    elif BUG == "kinds":
        schedules = [rates.LinearLR(optimizers[0], 0.5), rates.ExponentialLR(optimizers[0], 0.99)]
    else:
        schedules = [rates.ExponentialLR(optimizers[n], 0.99) for n in held]
    for step in range(8):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
        if BUG != "epochs" or step % 4 == 3:
            for schedule in schedules:
                schedule.step()
"""
RIGHT = ("", "warmup", "kinds", "classes", "epochs")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steered")
    record(folder, {"two": PROGRAM}, [("two", bug or "right", 0, 24, bug) for bug in (*RIGHT, "wrong")])
    return folder


def failing(trace: Trace) -> pl.DataFrame:
    frame = registry()["course"].examples(trace, [LAW]).frame
    return frame.filter(~frame["passed"].fill_null(value=True)).sort("step")


@pytest.mark.parametrize("bug", RIGHT)
def test_one_schedule_each_or_unlike_ones_are_right(runs: Path, bug: str) -> None:
    """Also one that steps once in four updates, and optimizers of two classes, of which one may have a fixed rate by design."""
    trace = Trace.load([runs / f"two-{bug or 'right'}"])
    assert not failing(trace).height
    assert LAW in registry()["course"].propose(trace)


def test_a_second_schedule_on_the_first_optimizer_is_told(runs: Path) -> None:
    trace = Trace.load([runs / "two-wrong"])
    found = failing(trace)
    assert found["step"].to_list()[0] == 0
    detail = registry()["course"].detail(trace, LAW, found.row(0, named=True))
    assert detail.seen == "2 schedulers ExponentialLR step the Adam #0, and none steps the Adam #1"
    assert detail.variable.startswith("#0~")
    assert "second scheduler" in detail.advice
