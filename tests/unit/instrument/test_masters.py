"""Optimizers whose groups hold flat masters, put there behind their construction as ZeRO does: no shipped rule takes the model's parameters for the optimizer's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")

from proctor.invariants.fit import load_packs
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

PROGRAM = """
    net = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    params = list(net.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    optimizer.param_groups[0]["params"] = [flat]
    for step in range(12):
        x = torch.randn(16, 6)
        for half in x.split(8):
            F.cross_entropy(net(half), half[:, :3].argmax(1)).backward()
            given = torch.cat([p.grad.flatten() for p in params])
            flat.grad = given if flat.grad is None else flat.grad + given
            for p in params:
                p.grad = None
        optimizer.step()
        flat.grad = None
        with torch.no_grad():
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.copy_(part.view_as(p))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("masters")
    record(made, {"flat": PROGRAM}, [("flat", "right", 0, 24, "")])
    return made


def told(run: Path) -> set[str]:
    trace = Trace.load([run])
    return {v.text for v in check(trace, load_packs([], trace)[0]).violations}


def test_a_right_program_is_told_nothing(folder: Path) -> None:
    assert told(folder / "flat-right") == set()
