"""oracle/collect: which of several gradients in a loop belong to an update: optimizers that ask for more, trials before the update, updates by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.recording.store import RankRecord, Recording  # noqa: E402


def values(rank: RankRecord, kind: str, step: int = 0) -> list[Any]:
    return [torch.from_numpy(rank.array(e).copy()) for e in rank.entries if (e.kind, e.name, e.step) == (kind, "first.weight", step)]


def test_an_optimizer_that_asks_for_gradients_makes_one_step(tmp_path: Path) -> None:
    net = Net()
    optimizer, seen = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3), []

    def asked() -> Any:
        optimizer.zero_grad()
        loss = net(batch()).square().mean()
        loss.backward()
        seen.append(net.first.weight.grad.clone())
        return loss

    with trace(net, tmp_path / "r"):
        optimizer.step(asked)
    rank = Recording(tmp_path / "r").ranks()[0]
    (grad,), (after,) = values(rank, "main_grad"), values(rank, "param_after")
    assert len(seen) > 1 and torch.equal(grad, seen[0]) and torch.equal(after, net.first.weight.detach())
    assert not rank.info.notes


@pytest.mark.parametrize("back", [True, False])
def test_a_trial_move_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool) -> None:
    monkeypatch.setattr("proctor.oracle.collect.collector.anything_compiled", lambda: False)  # another test has; a move may be a compiled step then
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trace(net, tmp_path / "r"):
        net(batch()).square().mean().backward()
        moves = [0.05 * p.grad for p in net.parameters()]
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        net(batch()).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves if back else (), strict=back):
                p.sub_(move)
        optimizer.step()
    rank = Recording(tmp_path / "r").ranks()[0]
    assert torch.equal(values(rank, "param_after")[0], net.first.weight.detach()) and rank.info.steps == 1
    assert torch.equal(values(rank, "main_grad")[0], net.first.weight.grad) and not rank.info.notes


def test_an_update_that_is_skipped_is_a_step(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trace(net, tmp_path / "r", steps=2):
        for _ in range(2):
            net(batch()).square().mean().backward()
            optimizer.zero_grad()
    assert Recording(tmp_path / "r").ranks()[0].info.steps == 2


@pytest.mark.parametrize("cleared", ["model", "parameters"])
def test_updates_by_hand_are_steps(tmp_path: Path, cleared: str) -> None:
    net, taken = Net(), []
    with trace(net, tmp_path / "r", steps=2):
        for _ in range(2):
            net(batch()).square().mean().backward()
            taken.append(net.first.weight.grad.clone())
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.1 * p.grad)
            if cleared == "model":
                net.zero_grad()
            else:
                for p in net.parameters():
                    p.grad = None
    rank = Recording(tmp_path / "r").ranks()[0]
    assert rank.info.steps == 2 and len(values(rank, "param_after", 1)) == 1
    if cleared == "model":
        assert torch.equal(values(rank, "main_grad", 0)[0], taken[0]) and torch.equal(values(rank, "main_grad", 1)[0], taken[1])
