"""Modules that a program calls beside each other, experts that ranks number from 0, parameters that are moved after the optimizer was made."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from helpers.oracle.prove_programs import WIDTH, data, who
from torch import nn

from proctor.oracle.prove import prove


class Blocks(nn.Module):
    """Two blocks with parameters of the same names, and a norm whose parameters may all begin with 1 and 0."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)])
        if random:
            for parameter in self.parameters():
                nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_parts(random: bool) -> Callable[[], None]:
    """A rank calls the blocks, and not what holds them."""

    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = Blocks(random)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = data()
        y = x.chunk(world)[rank]
        if world > 1:
            for block in reversed(list(reversed(model.blocks))):
                y = block(y)
        else:
            y = model(y)
        y.square().mean().backward()
        for parameter in model.parameters():
            if world > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        update.step()

    return train


def test_modules_that_are_called_beside_each_other_are_told_apart() -> None:
    verdict = prove(by_parts(True), by_parts(True), "dp=2")
    assert verdict.verdict == "PROVED" and verdict.outputs == 32, str(verdict)


def test_constants_are_told_apart_by_what_is_beside_them() -> None:
    """The norm's parameters are constants in both blocks; the linear layer's are not."""
    assert prove(by_parts(False), by_parts(False), "dp=2").verdict == "PROVED"


def only_norms(parts: bool) -> Callable[[], None]:
    def train() -> None:
        model = nn.ModuleDict({"first": nn.LayerNorm(WIDTH), "second": nn.LayerNorm(WIDTH)})
        whole = nn.Sequential(model["first"], model["second"])
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = data()
        (model["second"](model["first"](x)) if parts and dist.is_initialized() else whole(x)).square().sum().backward()
        update.step()

    return train


def test_what_cannot_be_told_apart_is_said() -> None:
    verdict = prove(only_norms(True), only_norms(True), "dp=2")
    assert verdict.verdict == "UNPROVED" and "do not tell which parameter" in verdict.why, str(verdict)


def experts(mistake: str = "") -> Callable[[], None]:
    """Two experts over two ranks, each of which calls its own the first; a row's expert is its number."""

    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        both = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(2)])
        kept = both if world == 1 else nn.ModuleList([both[0 if mistake == "the same" else rank]])
        model = nn.Module()
        model.experts = kept
        model.forward = lambda x: torch.cat([e(part) for e, part in zip(kept, x.chunk(2))]) if world == 1 else kept[0](x.chunk(2)[rank])  # type: ignore[method-assign]
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = data()
        model(x).square().sum().backward()
        update.step()

    return train


def test_experts_that_ranks_number_from_0_are_found_by_their_values() -> None:
    assert prove(experts(), experts(), "ep=2").verdict == "PROVED"


def test_a_rank_with_another_s_expert_is_refuted() -> None:
    assert prove(experts(), experts("the same"), "ep=2").verdict == "DIFFERENT"


def test_parameters_that_are_moved_after_the_optimizer_was_made_are_those_of_the_step() -> None:
    def train() -> None:
        rank, world = who()
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 3)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        if world > 1:
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            dist.broadcast(flat, 0)
            at = 0
            for p in model.parameters():
                p.data = flat[at : at + p.numel()].view_as(p)
                at += p.numel()
        x, target = (part.chunk(world)[rank] for part in data())
        nn.functional.cross_entropy(model(x), target).backward()
        for p in model.parameters():
            if world > 1:
                dist.all_reduce(p.grad)
                p.grad /= world
        update.step()

    verdict = prove(train, train, "dp=2")
    assert verdict.verdict == "PROVED" and verdict.outputs == 8, str(verdict)
