"""oracle/collect: which of several gradients in a loop belong to an update: optimizers that ask for more, trials before the update, updates by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.store import RankRecord, Recording  # noqa: E402


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
    monkeypatch.setattr("proctor.oracle.collect.acts.anything_compiled", lambda: False)  # another test has; a move may be a compiled step then
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


def train_together(first: Net, second: Net, rounds: int) -> None:
    """Two models with an optimizer each, that update in turn, from what both compute."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    for _ in range(rounds):
        for optimizer, sign in zip(optimizers, (1.0, -1.0), strict=True):
            optimizer.zero_grad()
            (sign * second.last(first.first(batch())).square().mean()).backward()
            optimizer.step()


def ask_twice(first: Net, second: Net, rounds: int) -> None:
    """An optimizer that asks for gradients, for each of its updates."""
    optimizer = torch.optim.LBFGS(first.parameters(), lr=0.1, max_iter=3)

    def asked() -> Any:
        optimizer.zero_grad()
        loss = first(batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(rounds):
        optimizer.step(asked)


def overflow(first: Net, second: Net, rounds: int) -> None:
    """A loss scaler that skips every other update, in a loop that clears between forward and backward."""
    optimizer, scaler = torch.optim.SGD(first.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(rounds):
        loss = first(batch()).square().mean() * (float("inf") if number % 2 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("train", [train_together, ask_twice, overflow])
def test_steps_are_those_that_the_recorder_counts(tmp_path: Path, train: Any) -> None:
    with trace(Net(), tmp_path / "r", steps=9):
        train(Net(), Net(), 3)
    info = Recording(tmp_path / "r").ranks()[0].info
    assert info.done and info.steps == 3, info.notes


def test_after_an_update_that_raised_steps_are_counted_on(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise FloatingPointError
            return super().step(closure)

    net = Net()
    with trace(net, tmp_path / "r", steps=9):
        optimizer = Failing(net.parameters(), lr=0.1)
        for fails in (True, False, False):
            optimizer.fails = fails
            net(batch()).square().mean().backward()
            with contextlib.suppress(FloatingPointError):
                optimizer.step()
            optimizer.zero_grad()
    assert Recording(tmp_path / "r").ranks()[0].info.steps == 2  # that of the update which came instead, and one more
