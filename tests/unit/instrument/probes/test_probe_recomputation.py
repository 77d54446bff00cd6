"""The recomputation probe: both passes of a checkpointed function, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch.utils import checkpoint as module

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Sink
from proctor.instrument.probes.recomputation import CHECKPOINT, Recomputation
from proctor.invariants.schema import Value
from proctor.native import Recorder

KIND, PLACE, FP = 2, 3, 6
FUNCTIONS = {"torch.nn.functional.dropout": torch.nn.functional, "torch.nn.functional.linear": torch.nn.functional}


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A sink that the probe fills, around real calls of torch."""
    sink = Sink(Recorder(), lambda: 0, RecordConfig(run=str(tmp_path)), lambda: True)
    probe = Recomputation(sink)

    def around(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        before, after = probe.hooks(name, Home.TORCH)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(args, kwargs)
            result, raised = None, True
            try:
                result, raised = function(*args, **kwargs), False
            finally:
                if after is not None:
                    after(args, kwargs, result, raised)
            return result

        return call

    monkeypatch.setattr(module, "checkpoint", around(module.checkpoint, CHECKPOINT))
    monkeypatch.setattr(torch.Tensor, "backward", around(torch.Tensor.backward, "torch.Tensor.backward"))
    for name, home in FUNCTIONS.items():
        attribute = name.rpartition(".")[2]
        monkeypatch.setattr(home, attribute, around(getattr(home, attribute), name))
    return sink


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
        self.scale = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x * random.random() if self.scale else x)  # type: ignore[no-any-return]


def passes(sink: Sink) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    rows = [(r[KIND], (r[PLACE], r[FP])) for r in sink.rows]
    return [r for k, r in rows if k == int(Value.FIRST)], [r for k, r in rows if k == int(Value.AGAIN)]


def train(block: Block, *, reentrant: bool, keep: bool = True) -> None:
    x = torch.linspace(0.1, 1, 32).view(8, 4).requires_grad_()
    module.checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=keep).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_second_pass_gives_what_the_first_gave(sink: Sink, reentrant: bool) -> None:
    train(Block(), reentrant=reentrant)
    first, again = passes(sink)
    assert len(first) == 3
    assert len(again) >= 2
    assert set(again) <= set(first)


@pytest.mark.parametrize("reentrant", [False, True])
def test_other_random_numbers_are_seen(sink: Sink, reentrant: bool) -> None:
    train(Block(), reentrant=reentrant, keep=False)
    first, again = passes(sink)
    assert set(again) - set(first)


def test_choices_of_other_generators_are_seen(sink: Sink) -> None:
    block = Block()
    block.scale = True
    train(block, reentrant=False)
    first, again = passes(sink)
    assert set(again) - set(first)


def test_a_backward_that_calls_functions_of_its_own_is_no_second_pass(sink: Sink) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(grad, torch.eye(4))

    train(Block(), reentrant=False)
    before = passes(sink)
    x = torch.ones(2, 4, requires_grad=True)
    Own.apply(x).sum().backward()
    torch.nn.functional.linear(x, torch.eye(4))
    assert passes(sink) == before, "outside of a checkpointed function nothing is read"
