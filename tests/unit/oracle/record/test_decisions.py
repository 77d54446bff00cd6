"""oracle/collect/decisions: choices and dropout as a recording sees them, and what a program notices of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.store import RankRecord, Recording  # noqa: E402
from proctor.oracle.tensors import key_of  # noqa: E402

WAYS: list[Callable[..., Any]] = [
    lambda f, x: f(x),
    lambda f, x: checkpoint(f, x, use_reentrant=False),
    lambda f, x: checkpoint(f, x, use_reentrant=True),
    lambda f, x: checkpoint(lambda v: checkpoint(f, v, use_reentrant=False), x, use_reentrant=True),
]


class Drops(nn.Module):
    """Drops in every way, some of it computed again in the backward pass."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.linear, self.drop = way, nn.Linear(8, 8), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True)

    def part(self, x: Any) -> Any:
        return F.dropout(torch.tanh(self.drop(self.linear(x))) * 2, 0.2, self.training, inplace=True)

    def forward(self, x: Any) -> Any:
        x = self.way(self.part, x)
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        path = x.new_empty(len(x), 1, 1).bernoulli_(0.5).div_(0.5)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1) * path


def losses(model: nn.Module, steps: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5, 8).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def recorded(path: Path, model: nn.Module, steps: int = 1, **options: Any) -> tuple[list[float], RankRecord]:
    torch.manual_seed(1)
    with trace(model, path, **options):
        found = losses(model, steps)
    return found, Recording(path).ranks()[0]


@pytest.mark.parametrize("way", WAYS)
def test_dropout_keeps_everything_and_leaves_generators_as_they_are(tmp_path: Path, way: Callable[..., Any]) -> None:
    plain, kept = Drops(way), Drops(way)
    torch.manual_seed(1)
    before = losses(plain, 2)
    state = torch.get_rng_state()
    after, rank = recorded(tmp_path / "r", kept, 2)
    assert torch.equal(state, torch.get_rng_state())
    assert after[0] != before[0] and after[1] == before[1]  # the second step is none of ours
    assert {(d.module, d.slot, d.p) for d in rank.info.draws if not d.recompute} >= {
        ("drop", "dropout.0", 0.3), ("attention", "attention.0", 0.2), ("recurrent", "recurrent.0", 0.4),
        ("", "dropout.0", 0.2), ("", "attention.0", 0.1), ("", "bernoulli.0", 0.5),
    }  # fmt: skip
    again = {(d.slot, d.mask) for d in rank.info.draws if d.recompute}
    assert again <= {(d.slot, d.mask) for d in rank.info.draws if not d.recompute}


def test_recomputation_keeps_what_the_first_pass_kept(tmp_path: Path) -> None:
    gradients = []
    for number, way in enumerate(WAYS):
        model = Drops(way)
        recorded(tmp_path / str(number), model)
        assert model.linear.weight.grad is not None
        gradients.append(model.linear.weight.grad.clone())
    assert all(torch.equal(gradients[0], g) for g in gradients)


def test_dropout_is_left_alone_on_request(tmp_path: Path) -> None:
    model = Drops(WAYS[1])
    torch.manual_seed(1)
    before = losses(model)
    after, rank = recorded(tmp_path / "r", Drops(WAYS[1]), dropout="draw")
    assert after == before and {d.p for d in rank.info.draws} == {0.1, 0.2, 0.3, 0.4, 0.5}


class Router(nn.Module):
    """Two of four experts, which are plain factors."""

    def __init__(self, way: Callable[..., Any] = WAYS[0]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.gate, self.experts = way, nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8))

    def part(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return (self.experts[chosen] * weights[..., None]).sum(-2) * x

    def forward(self, x: Any) -> Any:
        return self.way(self.part, x)


def test_choices_are_recorded_with_their_scores(tmp_path: Path) -> None:
    _, rank = recorded(tmp_path / "r", Router())
    (score,), (choice,) = ([e for e in rank.entries if e.kind == kind] for kind in ("score", "choice"))
    assert (score.name, score.slot, score.shape, choice.shape) == ("", "topk.0", (4, 5, 4), (4, 5, 2))
    assert np.array_equal(np.argsort(-rank.array(score), -1)[..., :2], rank.array(choice))


def test_a_given_choice_is_taken_also_in_recomputation(tmp_path: Path) -> None:
    given = np.stack([np.full((4, 5), 3), np.zeros((4, 5), np.int64)], -1)
    (tmp_path / "choices").mkdir()
    save_file({key_of(0, "choice", "", "topk.0", 0): given}, tmp_path / "choices" / "rank0.safetensors")
    outputs, gradients = [], []
    for number, way in enumerate(WAYS):
        model = Router(way)
        out = tmp_path / str(number)
        collector = Collector(CollectConfig(folder=str(out), decisions=str(tmp_path / "choices")))
        collector.install()
        collector.adopt([model])
        torch.manual_seed(1)
        losses(model)
        collector.end()
        rank = RankRecord(out / "rank0")
        assert not np.array_equal(rank.array(next(e for e in rank.entries if e.kind == "choice")), given)  # its own is recorded
        outputs.append(rank.array(next(e for e in rank.entries if e.kind == "output" and e.name == "")))
        assert model.gate.weight.grad is not None and model.experts.grad is not None
        gradients.append((model.gate.weight.grad.clone(), model.experts.grad.clone()))
    model = Router()
    torch.manual_seed(1)
    x = torch.randn(4, 5, 8)
    scores = model.gate(x).softmax(-1)
    expected = (scores[..., [3, 0], None] * model.experts[[3, 0]]).sum(-2) * x
    expected.square().mean().backward()
    assert all(np.allclose(o, expected.detach().numpy(), atol=1e-6) for o in outputs)
    assert model.gate.weight.grad is not None and model.experts.grad is not None
    for gate, experts in gradients:
        assert torch.allclose(gate, model.gate.weight.grad, atol=1e-6) and torch.allclose(experts, model.experts.grad, atol=1e-6)
    assert not model.experts.grad[1:3].any()


def test_what_chooses_in_another_way(tmp_path: Path) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            x = x * self.weight
            x.argmax(), x.max(), x.long().sort(), torch.max(x, x)  # over everything, of integers, of two: no choice
            top = torch.max(x, 1, keepdim=True).values + x.sort(dim=0, descending=True)[0].mean()
            return top + x.argmin(-1, keepdim=True) + torch.argsort(x, dim=-1)

    _, rank = recorded(tmp_path / "r", Chooses())
    shapes = {e.slot: e.shape for e in rank.entries if e.kind == "choice"}
    assert shapes == {"max.0": (4, 8, 1), "sort.0": (5, 8, 4), "argmin.0": (4, 5, 1), "argsort.0": (4, 5, 8)}
    assert json.loads(key_of(0, "choice", "a", "max.0", 2)) == [0, "choice", "a", "max.0", 2]
