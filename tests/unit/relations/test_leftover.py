"""Gradients that the backward for another optimizer left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record

PROGRAMS = {
    "program": """
        first, second, shared = nn.Linear(WIDTH, 4), nn.Linear(4, 1), nn.Linear(WIDTH, WIDTH)
        optimizers = [torch.optim.SGD([*first.parameters()], 0.01), torch.optim.SGD([*second.parameters()], 0.01), torch.optim.SGD([*shared.parameters()], 0.01)]
        for step in range(8):
            x = torch.randn(8, WIDTH)
            if BUG == "accumulates":  # on purpose: the second one updates every fourth time, and the first each time
                second(first(shared(x))).mean().backward()
                for n, optimizer in enumerate(optimizers):
                    if n != 1 or step % 4 == 3:
                        optimizer.step()
                        optimizer.zero_grad()
                continue
            if BUG != "cleared behind":
                optimizers[1].zero_grad()
            second(first(shared(x))).mean().backward()  # gives all three gradients
            optimizers[0].step()
            optimizers[0].zero_grad()
            if BUG == "by hand":
                for p in [*second.parameters(), *shared.parameters()]:
                    p.grad = None
            elif BUG == "in place":
                for p in [*second.parameters(), *shared.parameters()]:
                    p.grad.data.zero_()
            elif BUG != "cleared behind":
                optimizers[1].zero_grad()
                optimizers[2].zero_grad()
            second(first(shared(x)).detach()).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            optimizers[2].zero_grad()
    """,
    "twice": """
        shared, critic, decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        one = torch.optim.SGD([*shared.parameters(), *critic.parameters()], 0.01)
        two = torch.optim.SGD([*decoder.parameters(), *shared.parameters()], 0.01)
        for step in range(8):
            x = torch.randn(8, WIDTH)
            one.zero_grad()
            critic(shared(x)).square().mean().backward()
            one.step()
            if BUG:
                decoder.zero_grad()
            else:
                two.zero_grad()
            (decoder(shared(x)) - x).square().mean().backward()
            two.step()
    """,
}
HEALTHY = ("", "accumulates", "by hand", "in place")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftover")
    record(folder, PROGRAMS, [("program", how or "right", 0, 6, how) for how in (*HEALTHY, "cleared behind")] + [("twice", how or "right", 0, 6, how) for how in ("", "wrong")])
    return folder


def test_what_another_backward_left_is_told_with_its_optimizers(runs: Path) -> None:
    said = failed_of("course", "leftover", runs / "program-cleared behind")
    assert said and all("#1 steps with gradients" in text and "behind which #0 stepped" in text for text in said)


@pytest.mark.parametrize("how", HEALTHY)
def test_who_clears_or_accumulates_is_told_nothing(runs: Path, how: str) -> None:
    assert failed_of("course", "leftover", runs / f"program-{how or 'right'}") == []


def test_what_two_optimizers_hold_is_cleared_for_each(runs: Path) -> None:
    assert failed_of("course", "leftover", runs / "twice-right") == []
    said = failed_of("course", "leftover", runs / "twice-wrong")
    assert said and all("steps with gradients of 2 parameters" in text for text in said)
