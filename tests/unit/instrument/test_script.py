"""Scripts that make their model before they define their functions, as many examples do."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from helpers.trained import record

from proctor.invariants.trace import Trace

PROGRAMS = {
    "script": """
        model = nn.Linear(WIDTH, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.rand(2, WIDTH))
        def loss_of(x):
            return model(x).square().mean()
        def train():
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(torch.rand(4, WIDTH)).backward()
                optimizer.step()
        def validate():
            with torch.no_grad():
                return loss_of(torch.rand(4, WIDTH))
        for epoch in range(3):
            train()
            validate()
    """,
}


def test_functions_that_are_defined_behind_the_model_are_observed(tmp_path: Path) -> None:
    record(tmp_path, PROGRAMS, [("script", "run", 0, 4, "")])
    trace = Trace.load([tmp_path / "script-run"])
    made = {name: trace.calls.filter(pl.col("fn") == code).height for code, name in enumerate(trace.functions) if name}
    assert made["__main__.validate"] == 3
    assert 10 <= made["__main__.loss_of"] <= 12  # the first ones may have begun before their function was known
