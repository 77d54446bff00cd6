"""An engine with the trainer's weights is told from one with others, also where it has joined or rounded them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import proctor
from proctor.errors import ProctorError
from proctor.weights import WeightsDiffer, differing, digest, require_same


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))


FUSE = {f"qkv.{kind}": [f"{name}.{kind}" for name in "qkv"] for kind in ("weight", "bias")}


def engine_of(trainer: Trainer, order: str = "qkv") -> dict[str, torch.Tensor]:
    state = trainer.state_dict()
    joined = {f"qkv.{kind}": torch.cat([state[f"{name}.{kind}"] for name in order]).bfloat16() for kind in ("weight", "bias")}
    return {**joined, "scale": state["scale"].bfloat16()}


def test_joined_and_rounded_weights_are_the_trainers_and_a_digest_is_json() -> None:
    trainer = Trainer()
    sent = json.loads(json.dumps(digest(trainer, dtype=torch.bfloat16, fuse=FUSE)))
    assert differing(sent, digest(engine_of(trainer))) == []
    require_same(sent, digest(engine_of(trainer).items()))


def test_weights_of_the_synchronisation_before_are_told() -> None:
    trainer = Trainer()
    stale = digest(engine_of(trainer))
    with torch.no_grad():
        trainer.k.weight[3, 5] += 0.5
    assert [line.partition(":")[0] for line in differing(digest(trainer, dtype=torch.bfloat16, fuse=FUSE), stale)] == ["qkv.weight"]
    with pytest.raises(WeightsDiffer, match=r"1 of 3 weights differ: qkv\.weight: other values"):
        require_same(digest(trainer, dtype=torch.bfloat16, fuse=FUSE), stale)


def test_parts_in_another_order_are_told_though_all_values_are_there() -> None:
    trainer = Trainer()
    lines = differing(digest(trainer, dtype=torch.bfloat16, fuse=FUSE), digest(engine_of(trainer, "qvk")))
    assert len(lines) == 2 and all("other values" in line for line in lines)


def test_missing_ones_and_other_types_are_told() -> None:
    trainer = Trainer()
    lines = differing(digest(trainer), digest({"q.weight": trainer.q.weight.half(), "more": torch.ones(2)}))
    assert "q.weight: float32[8, 8] in the trainer, float16[8, 8] in the engine" in lines
    assert "more: the trainer has none" in lines and "v.bias: the engine has none" in lines


def test_bad_names_and_parts_are_one_clear_error() -> None:
    trainer = Trainer()
    with pytest.raises(ProctorError, match=r"no weight is called 'o\.weight'"):
        digest(trainer, fuse={"x": ["o.weight"]})
    with pytest.raises(ProctorError, match="do not lie one behind the other"):
        digest(trainer, fuse={"x": ["q.weight", "q.bias"]})
    assert proctor.weights.digest({"step": 3}) == {}
