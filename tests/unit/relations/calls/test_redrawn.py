"""`stays`, `redrawn`: a model that is initialised behind its load."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record

PROGRAM = """
    def make():
        return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    def draw(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02) if BUG == "data" else nn.init.xavier_uniform_(module.weight)
    net, other = make(), make()
    state = make().state_dict()
    net.load_state_dict(state)
    if BUG in ("applied", "data", "called", "again"):
        if BUG == "called":
            net(torch.randn(4, 8))
        net.apply(draw)
        if BUG == "again":
            net.load_state_dict(other.state_dict())
    elif BUG == "head":
        draw(net[4])
    with torch.no_grad():
        for p, q in zip(net.parameters(), other.parameters()):
            if BUG == "perturbed":
                p.mul_(0.5).add_(0.5 * q)
            elif BUG == "pruned":
                p.mul_(p.abs() > p.abs().median())
            elif BUG == "cast":
                p.copy_(p.bfloat16())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(8):
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if step == 3 and BUG == "later":
            net.load_state_dict(state)
            net.apply(draw)
"""
RIGHT = ("right", "called", "again", "head", "perturbed", "pruned", "cast", "later")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("redrawn")
    record(folder, {"program": PROGRAM}, [("program", how, 0, 24, how) for how in (*RIGHT, "applied", "data")])
    return folder


@pytest.mark.parametrize("how", RIGHT)
def test_what_was_loaded_may_change_and_may_be_drawn_anew_where_it_was_used(runs: Path, how: str) -> None:
    """Of what happens behind the first update nothing is said."""
    assert failed_of("stays", "redrawn", runs / f"program-{how}") == []


@pytest.mark.parametrize("how", ["applied", "data"])
def test_a_model_that_is_initialised_behind_its_load_is_told(runs: Path, how: str) -> None:
    (told,) = failed_of("stays", "redrawn", runs / f"program-{how}")
    assert told.startswith("0.weight: Sequential was loaded, and all of its matrices")
