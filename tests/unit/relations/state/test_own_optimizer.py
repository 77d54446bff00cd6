"""An optimizer of the program's own that clips and schedules within its update, or hands its work to others, is as right as one that does not."""

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
CLEARS = "torch.optim.Optimizer.zero_grad"
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
    "handed": """
        class All(torch.optim.Optimizer):
            def __init__(self, optimizers):
                super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})
                self.optimizers = optimizers
            def step(self, closure=None):
                for optimizer in self.optimizers:
                    optimizer.step()
            def zero_grad(self, set_to_none=True):
                for optimizer in self.optimizers[: 1 if BUG == "part" else None]:
                    optimizer.zero_grad(set_to_none=BUG != "zeros")
        known = [All.zero_grad]  # it is held elsewhere, too, so that it is no function of the program's own for us
        net = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1))
        optimizer = All([torch.optim.SGD(layer.parameters(), lr=0.01) for layer in net])
        if BUG == "twice":
            optimizer = All([optimizer])
        for step in range(6):
            optimizer.zero_grad()
            (net(torch.randn(8, 6)) - 3).square().mean().backward()
            optimizer.step()
    """,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    jobs = {"warmed": ("right", "in_front", "stuck", "part"), "handed": ("right", "zeros", "twice", "part")}
    record(folder, PROGRAMS, [(program, bug, 0, 8, bug) for program, bugs in jobs.items() for bug in bugs])
    return folder


def _still(run: Path, attr: str = "data", act: str = UPDATE) -> list[tuple[int, str]]:
    """Parameters that an act should have changed, as an update does: step and name."""
    rule = Hypothesis.of("contain", attr=attr, kind="change", parent=act, role="parameter", who="trainable")
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


@pytest.mark.parametrize("how", ["right", "zeros", "twice"])
def test_an_optimizer_that_hands_its_clearing_to_others_clears(runs: Path, how: str) -> None:
    assert not _still(runs / f"handed-{how}", "grad", CLEARS)


def test_an_optimizer_that_clears_some_of_those_that_it_holds_is_told(runs: Path) -> None:
    assert {name for _, name in _still(runs / "handed-part", "grad", CLEARS)} == {"1.weight", "1.bias"}


def test_buffers_of_a_scripted_copy_are_looked_at() -> None:
    scripted = [torch.jit.script(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))) for _ in range(2)]
    found = Statistics(*scripted)
    assert found.step(moved=True) is None
    scripted[0](torch.randn(8, 6))
    scripted[0].eval()
    assert found.step(moved=True) == "1.running_mean was the model's and leaves it, though the model's has not changed"
