"""An optimizer of the program's own that clips and schedules within its update is as right as one that leaves both to the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.trained import failed_of, record

from proctor.instrument.probes._statistics import Statistics
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

UPDATE = "torch.optim.Optimizer.step"
PROGRAMS = {
    "warmed": """
        class Own(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 0.1})
                self.count = 0
            def step(self, closure=None):
                for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
                    if BUG != "in_front":
                        torch.nn.utils.clip_grad_norm_(p, 1.0)
                    rate = 0.0 if BUG == "stuck" else 0.1 * min(self.count, 4) / 4
                    if not (BUG == "part" and p.ndim == 1):
                        p.data.add_(p.grad, alpha=-rate)
                self.count += 1
        net = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1))
        optimizer = Own(net.parameters())
        for step in range(10):
            if BUG == "in_front" and step:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.zero_grad()
            (net(torch.randn(8, 6)) - 3).square().mean().backward()
            optimizer.step()
    """,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    record(folder, {"warmed": PROGRAMS["warmed"]}, [("warmed", bug, 0, 8, bug) for bug in ("right", "in_front", "stuck", "part")])
    return folder


def _still(run: Path) -> list[tuple[int, str]]:
    """Parameters that an update should have changed: step and name."""
    rule = Hypothesis.of("contain", attr="data", kind="change", parent=UPDATE, role="parameter", who="trainable")
    frame = registry()["contain"].examples(Trace.load([run]), [rule]).frame
    return sorted(frame.filter(~frame["passed"]).select("step", "_name").iter_rows())


def test_clipping_and_a_rate_that_begins_at_0_within_an_update_are_right(runs: Path) -> None:
    assert not failed_of("course", "clips", runs / "warmed-right")
    assert not _still(runs / "warmed-right")


def test_clipping_in_front_of_the_backward_is_told(runs: Path) -> None:
    assert failed_of("course", "clips", runs / "warmed-in_front")


def test_an_own_optimizer_that_never_moves_or_leaves_parameters_out_is_told(runs: Path) -> None:
    assert {name for _, name in _still(runs / "warmed-stuck")} >= {"0.weight", "1.weight"}
    assert {name for _, name in _still(runs / "warmed-part")} == {"0.bias"}  # one number may stay where it is by chance
    assert min(step for step, _ in _still(runs / "warmed-part")) >= 1


def test_buffers_of_a_scripted_copy_are_looked_at() -> None:
    scripted = [torch.jit.script(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))) for _ in range(2)]
    found = Statistics(*scripted)
    assert found.step(moved=True) is None
    scripted[0](torch.randn(8, 6))
    scripted[0].eval()
    assert found.step(moved=True) == "1.running_mean was the model's and leaves it, though the model's has not changed"
