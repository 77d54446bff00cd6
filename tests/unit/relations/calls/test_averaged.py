"""`course`, `averaged`: a model that is averaged with itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record

PROGRAM = """
    import copy
    net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    average = copy.deepcopy(net) if BUG == "copied" else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    def averages(source, target, decay):
        there = target.state_dict()
        for name, p in source.state_dict().items():
            there[name].data.copy_(there[name].data * decay + p.data * (1 - decay))
    for step in range(12):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        if BUG == "perturbed":  # there and back: what is left is rounding
            noises = [0.1 * torch.randn_like(p) for p in net.parameters()]
            with torch.no_grad():
                for p, noise in zip(net.parameters(), noises):
                    p.add_(noise)
                net(x)
                for p, noise in zip(net.parameters(), noises):
                    p.sub_(noise)
        (net(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            if BUG == "normalised":
                for p in net.parameters():
                    p.div_(p.norm())
            elif BUG == "decays":
                for p in net.parameters():
                    p.mul_(1 - 1e-7)
            elif BUG == "one":
                averages(net[0], net[0], 0.999) if step == 5 else None
            elif BUG in ("copied", "itself") or (BUG == "late" and step > 5):
                averages(net, average, 0.999)
"""
RIGHT = ("copied", "perturbed", "normalised", "decays", "one")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    record(folder, {"program": PROGRAM}, [("program", how, 0, 24, how) for how in (*RIGHT, "itself", "late")])
    return folder


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_written_between_updates_may_be_less_than_an_average_of_one_model(runs: Path, how: str) -> None:
    assert failed_of("course", "averaged", runs / f"program-{how}") == []


@pytest.mark.parametrize("how", ["itself", "late"])
def test_an_average_that_is_no_copy_is_told(runs: Path, how: str) -> None:
    (told,) = failed_of("course", "averaged", runs / f"program-{how}")
    assert told.startswith("0.weight: ") and "changed by rounding alone" in told
