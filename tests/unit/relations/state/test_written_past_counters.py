"""What a program writes past version counters behind each update is known before a checkpoint shows it behind an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record, trace_of

pytest.importorskip("torch")

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry

PROGRAMS = {
    "program": """
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(12):
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()
            if BUG != "swapped":
                for p in model.parameters():
                    p.data.clamp_(-0.05, 0.05)
            if step % 4 == 3:
                if BUG == "swapped":
                    for p in model.parameters():
                        p.data.mul_(0.9)
                model.eval()
                with torch.no_grad():
                    model(torch.randn(8, 6))
                model.train()
                torch.save(model.state_dict(), OUT + ".pt")
    """
}


def test_parameters_that_are_clamped_with_each_update_are_not_changed_by_an_evaluation(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("program", "clamped", 0, 8, ""), ("program", "swapped", 0, 8, "swapped")])
    rule = [Hypothesis.of("progress", mode="evaluation")]
    failed = {name: trace_of(tmp_path / f"program-{name}") for name in ("clamped", "swapped")}
    steps = {name: registry()["progress"].examples(trace, rule).frame.filter(~registry()["progress"].examples(trace, rule).frame["passed"])["step"].unique().sort().to_list() for name, trace in failed.items()}
    assert steps == {"clamped": [], "swapped": [3, 7]}
