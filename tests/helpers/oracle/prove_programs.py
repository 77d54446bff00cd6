"""A two-layer network, alone and cut over ranks by hand as Megatron does it, with ordinary `dist.*` calls and mistakes to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, INNER, ROWS = 4, 6, 6


class ToAll(torch.autograd.Function):
    """Identity forward, sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mistake: str) -> torch.Tensor:
        ctx.mistake = mistake
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        if ctx.mistake != "backward missing":
            dist.all_reduce(grad)
        return grad, None


class FromAll(torch.autograd.Function):
    """Sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mistake: str) -> torch.Tensor:
        x = x.clone()
        if mistake != "forward missing":
            dist.all_reduce(x, op=dist.ReduceOp.AVG if mistake == "average" else dist.ReduceOp.SUM)
        if mistake == "doubled":
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class MLP(nn.Module):
    def __init__(self, rank: int, world: int, mistake: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.world, self.mistake = world, mistake
        if world > 1:
            part = slice(rank * INNER // world, (rank + 1) * INNER // world)
            first = slice(0, INNER // world) if mistake == "same shard" else part
            self.up.weight = nn.Parameter(self.up.weight.detach()[first].clone())
            self.up.bias = nn.Parameter(self.up.bias.detach()[part].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach()[:, part].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.world > 1:
            y = ToAll.apply(y, self.mistake)
        y = self.down(torch.nn.functional.gelu(self.up(y)))
        if self.world > 1:
            y = FromAll.apply(y, self.mistake)
        return x + y


class Net(nn.Module):
    def __init__(self, rank: int = 0, world: int = 1, mistake: str = "") -> None:
        super().__init__()
        self.first, self.second = MLP(rank, world, mistake), MLP(rank, world)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def who() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randint(0, 3, (ROWS,), generator=g)


def tensor_parallel(mistake: str = "", optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Callable[[], None]:
    """A step with the inner dimension cut over all ranks; alone without a process group."""

    def train() -> None:
        torch.manual_seed(0)
        model = Net(*who(), mistake)
        update = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        x, target = data()
        nn.functional.cross_entropy(model(x), target).backward()
        update.step()

    return train


def data_parallel(mistake: str = "", clip: bool = False) -> Callable[[], None]:
    """A step with the rows cut over all ranks."""

    def train() -> None:
        torch.manual_seed(0)
        rank, world = who()
        model = Net()
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, target = (part.chunk(world)[rank] for part in data())
        nn.functional.cross_entropy(model(x), target).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if world > 1 and not (mistake == "one not reduced" and name == "second.up.weight"):
                dist.all_reduce(parameter.grad)
                if mistake != "sum":
                    parameter.grad /= world
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        update.step()

    return train
