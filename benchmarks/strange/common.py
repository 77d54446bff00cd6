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
        wrong: words of mistakes, each with a regular expression on the culprit that is right, `side:module`.
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


class Copy(torch.autograd.Function):
    """The input of layers cut over the ranks; back: the sum of their gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Sum(torch.autograd.Function):
    """The sum over the ranks; back: the gradient as it is."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Both(torch.autograd.Function):
    """The sum over the ranks; back: the sum of their gradients, since each rank goes on with a part of its own."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Mlp(nn.Module):
    """Two layers with a norm between them."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))


def tokens(steps: int, rows: int = 8, length: int = 12, vocab: int = 32, seed: int = 2) -> Iterator[torch.Tensor]:
    """Tokens with one more than a model's input in each row, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(vocab, (rows, length + 1), generator=generator)


class Attention(nn.Module):
    """Causal attention; as many heads as the projections have."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=name != "o") for name in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.RMSNorm(width), FeedForward(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self, vocab: int = 32, width: int = 16, heads: int = 4, layers: int = 2, length: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.RMSNorm):
                    module.weight.normal_(1.0, 0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token(logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten())
