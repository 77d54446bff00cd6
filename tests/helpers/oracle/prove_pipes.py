"""A network as a pipeline, by hand with send and recv; alone, gradients of microbatches add up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from helpers.oracle.prove_programs import WIDTH, who

ROWS = 2  # of a microbatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def layers(count: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({str(k): Block() for k in range(count)})


class Stage(nn.Module):
    """Layers of the whole network under their own names."""

    def __init__(self, whole: nn.ModuleDict, keep: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): whole[str(k)] for k in keep})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def data(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(ROWS * microbatches, WIDTH, generator=g), torch.randn(ROWS * microbatches, WIDTH, generator=g)


def alone(count: int, microbatches: int) -> None:
    """The reference: gradients add up over microbatches."""
    model = Stage(layers(count), range(count))
    update = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, target in zip(*(part.chunk(microbatches) for part in data(microbatches))):
        (nn.functional.mse_loss(model(x), target) / microbatches).backward()
    update.step()


def by_hand(count: int = 2, microbatches: int = 2, order: str = "1f1b", mistake: str = "", late: bool = False) -> Callable[[], None]:
    """A stage on each rank, with send and recv: all forwards first ("gpipe"), or one forward, one backward ("1f1b"). `late`: gradients are divided,
    as torch's schedules do, and not each loss."""

    def train() -> None:
        rank, world = who()
        if world == 1:
            return alone(count, microbatches)
        each = count // world
        model = Stage(layers(count), range(rank * each, (rank + 1) * each))
        update = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, target = (part.chunk(microbatches) for part in data(microbatches))
        waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def forward(k: int) -> None:
            given = x[k].clone() if rank == 0 else torch.zeros(ROWS, WIDTH)
            if rank > 0:
                dist.recv(given, rank - 1)
            given.requires_grad_(rank > 0)
            found = model(given)
            if rank < world - 1:
                dist.send(found.detach().clone(), rank + 1)
            waiting.append((k, given, found))

        def backward() -> None:
            k, given, found = waiting.pop(-1 if mistake == "last first" and rank == 0 else 0)
            if rank == world - 1:
                divided = 1 if mistake == "not divided" or late else microbatches
                (nn.functional.mse_loss(found, target[k]) / divided).backward()
            else:
                grad = torch.zeros(ROWS, WIDTH)
                dist.recv(grad, rank + 1)
                found.backward(grad)
            if rank > 0:
                assert given.grad is not None
                dist.send(given.grad.clone(), rank - 1)

        ahead = microbatches if order == "gpipe" else min(microbatches, world - rank)
        for k in range(ahead):
            forward(k)
        for k in range(ahead, microbatches):
            backward()
            forward(k)
        while waiting and not (mistake == "last left out" and len(waiting) == 1):
            backward()
        for parameter in model.parameters() if late else ():
            assert parameter.grad is not None
            parameter.grad.div_(microbatches - (mistake == "divided by another"))
        update.step()

    return train
