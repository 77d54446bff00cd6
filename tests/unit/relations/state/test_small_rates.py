"""`contain`: parameters that a small learning rate cannot move, and such that it can and does not."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

PACK = Path(__file__).resolve().parents[4] / "invariants" / "packs" / "torch.json"
BUGS = ("sgd", "adam", "held", "falls", "batches", "cosine", "warm", "ends", "rests", "restarts", "last")
VANISHED = [Hypothesis.of("progress", mode="vanished")]
PROGRAMS = {
    "rates": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.norm, self.last = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.last(self.norm(self.fc(x)))
        class Holding(torch.optim.SGD):
            def step(self, closure=None):
                kept = self.param_groups[0]["params"][2].detach().clone()
                super().step(closure)
                if BUG == "held":
                    self.param_groups[0]["params"][2].data.copy_(kept)
        net = Net()
        kind, rate = {"sgd": (torch.optim.SGD, 4e-6), "adam": (torch.optim.Adam, 2e-6), "held": (Holding, 0.1), "falls": (torch.optim.SGD, 0.1), "batches": (torch.optim.Adam, 0.1), "cosine": (torch.optim.Adam, 0.1), "warm": (torch.optim.Adam, 1e-13)}.get(BUG, (torch.optim.Adam, 0.1))
        optimizer = kind(net.parameters(), rate)
        RATES = {"ends": lambda i: max(0.0, 1 - i / 10), "rests": lambda i: 1.0 if i < 10 else 0.0, "restarts": lambda i: max(0.0, 1 - i % 14 / 8), "last": lambda i: max(0.0, 1 - i / 20)}
        schedulers = {"batches": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.01), "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 11), **{bug: lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, RATES[BUG]) for bug in RATES}}
        scheduler = schedulers[BUG]() if BUG in schedulers else None
        for step in range(24 if BUG in RATES else 12):
            x = torch.randn(16, 6)
            (F.cross_entropy(net(x), x[:, :3].argmax(1)) / (1 if BUG == "held" else 20)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            if BUG == "warm" and step > 4:
                optimizer.param_groups[0]["lr"] *= 100
            if BUG == "falls" and step == 5:
                optimizer.param_groups[0]["lr"] = 3e-6
    """,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    record(folder, PROGRAMS, [("rates", bug, 0, 8, bug) for bug in BUGS])
    return folder


@pytest.mark.parametrize("manner", ["sgd", "adam", "falls"])
def test_a_rate_that_is_too_small_to_move_a_vector_is_no_missing_update(runs: Path, manner: str) -> None:
    found = check(Trace.load([runs / f"rates-{manner}"]), [read_pack(PACK)]).violations
    assert not [v for v in found if v.relation == "contain"], [v.seen for v in found]


def test_a_vector_that_its_rate_moves_and_that_stays_is_found(runs: Path) -> None:
    found = [v for v in check(Trace.load([runs / "rates-held"]), [read_pack(PACK)]).violations if v.relation == "contain"]
    assert {v.variable for v in found} == {"norm.weight"}


@pytest.mark.parametrize("manner", BUGS)
def test_a_rate_that_fell_until_nothing_moves_is_told_with_its_scheduler(runs: Path, manner: str) -> None:
    """Not one that is small from the beginning, that a warm-up begins with, or that reaches zero with the last update; nor is anything taken back."""
    relation, trace = registry()["progress"], Trace.load([runs / f"rates-{manner}"])
    bad = relation.examples(trace, VANISHED).frame.filter(~pl.col("passed"))
    assert relation.examples(trace, [Hypothesis.of("progress", mode="undone")]).frame["passed"].all()
    if manner == "ends":
        assert bad["step"].min() == 17 and bad["step"].max() == 22
        assert "has moved in 8 updates, since its learning rate is 0, down from 0.1; LambdaLR has stepped 18 times in 18 updates" in relation.detail(trace, VANISHED[0], bad.row(0, named=True)).seen
    if manner not in ("batches", "ends"):
        assert bad.is_empty()
    if manner != "batches":
        return
    assert bad["step"].min() < 8 and bad["step"].max() > 9
    detail = relation.detail(trace, VANISHED[0], bad.row(0, named=True))
    assert "its learning rate is too small: 1e-" in detail.seen and "down from 0.1; StepLR has stepped " in detail.seen, detail.seen
    assert relation.say(VANISHED[0]).startswith("the learning rate")
