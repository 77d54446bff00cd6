"""What the strange programs share: a table of cases, the process group, a batch and its halves.

    python benchmarks/strange/FILE.py CASE [WORD]      # alone, or on a rank of torchrun; `--list` names the cases

A case is one function that trains a few steps. It gets a word: "" is the program as it should be, further ones are other right ways of
doing the same (`right`) or mistakes (`wrong`). On one rank without a word it is the reference. Nobody wrote them for a rule: they are
what people write.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class Case:
    """One strange program.

    Attributes:
        run: gets the word.
        right: words of right variants on several ranks.
        wrong: words of mistakes, each with a regular expression on the names that a report may blame.
        world: ranks of the candidates.
        steps: optimizer updates that are compared.
        reference: word of the reference.
    """

    run: Callable[[str], None]
    right: tuple[str, ...] = ("",)
    wrong: Mapping[str, str] = field(default_factory=dict)
    world: int = 2
    steps: int = 1
    reference: str = ""


def main(cases: Mapping[str, Case]) -> None:
    """Run the case that the command line names."""
    if sys.argv[1] == "--list":
        print(json.dumps({n: {"right": c.right, "wrong": dict(c.wrong), "world": c.world, "steps": c.steps, "reference": c.reference} for n, c in cases.items()}))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    cases[sys.argv[1]].run(sys.argv[2] if len(sys.argv) > 2 else "")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


def batches(steps: int, rows: int = 8, width: int = 8, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(rows, width, generator=generator), torch.randn(rows, 4, generator=generator)


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return x.chunk(WORLD)[RANK]


def average(model: nn.Module) -> None:
    """Average gradients over ranks."""
    for p in model.parameters():
        if WORLD > 1 and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= WORLD


class Mlp(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))
