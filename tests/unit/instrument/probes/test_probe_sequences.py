"""What attention sees is told of places by places, not of a square whose columns are distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes.sequences import Sequences
from proctor.native import Recorder

PLACES, WIDTH = 8, 4


def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(1, 2) / WIDTH**0.5


def masked(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return plain(q, k).masked_fill(torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1), float("-inf"))


def biased(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A bias by distance, cut out of a larger table."""
    return plain(q, k) + F.pad(torch.randn(PLACES, 2 * PLACES, requires_grad=True), (1, 1))[:, :PLACES]


def by_distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Each place attends to as many places before it as there are: the keys of the block before are there, too."""
    products = q @ torch.cat([torch.randn_like(k), k], 1).transpose(1, 2)
    return F.pad(products.reshape(len(q), -1), (0, PLACES)).view(len(q), PLACES, 2 * PLACES + 1)[:, :, :PLACES] + q @ torch.randn(WIDTH, PLACES)


@pytest.mark.parametrize(("scores", "sight"), [(plain, "open"), (masked, "causal"), (biased, "open"), (by_distance, "")])
def test_a_square_of_distances_is_not_said_to_be_open(monkeypatch: pytest.MonkeyPatch, scores: Any, sight: str) -> None:
    sink, said = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True), []
    monkeypatch.setattr(sink, "number", lambda *_, facts, **__: said.append(facts))
    probe, model = Sequences(sink), torch.nn.Linear(WIDTH, 50)
    text = torch.randperm(50)[: 4 * (PLACES + 1)].reshape(4, -1)
    ids, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    hidden = torch.randn(4, PLACES, WIDTH, requires_grad=True)
    probe._begins((model, ids), None)
    probe._embeds((ids,), None)
    weights = scores(hidden, hidden)
    probe._weighs((weights,), {"dim": -1})
    out = model(weights.softmax(-1) @ hidden)
    probe._loss((out.view(-1, 50), targets.view(-1)), None)
    assert [(facts["what"], facts["sight"]) for facts in said] == [("next", sight)]
