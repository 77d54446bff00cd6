"""Softmax, cross-entropy and norms whose reduced dimension is cut over ranks, by hand with ordinary `dist.*` calls, and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from helpers.prove_programs import FromAll, ToAll, who

WIDTH, CLASSES, ROWS, KEYS = 4, 6, 4, 6


class VocabularyLoss(torch.autograd.Function):
    """Megatron's cross-entropy: every rank has some of the classes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, mistake: str) -> torch.Tensor:
        rank, world = who()
        first = rank * (CLASSES // world)
        top = logits.max(dim=-1)[0]
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top.unsqueeze(-1)
        away = (target < first) | (target >= first + CLASSES // world)
        at = (target - first).masked_fill(away, 0)
        picked = logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).masked_fill(away, 0.0)
        e = logits.exp()
        total = e.sum(-1)
        if mistake != "sum missing":
            dist.all_reduce(total)
        dist.all_reduce(picked)
        ctx.save_for_backward(e / total.unsqueeze(-1), at, away)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        soft, at, away = ctx.saved_tensors
        soft = soft.clone()
        soft[torch.arange(len(at)), at] -= (~away).to(soft.dtype)
        return soft * grad / len(at), None, None


class CutAttention(torch.autograd.Function):
    """Every rank has some of the keys and values: softmax in parts, each by its own largest score, put together at the end."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        score = q @ k.T / WIDTH**0.5
        mine = score.amax(-1, keepdim=True)
        e = (score - mine).exp()
        part, total = e @ v, e.sum(-1, keepdim=True)
        top = mine.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        scale = (mine - top).exp()
        part, total = part * scale, total * scale
        dist.all_reduce(part)
        dist.all_reduce(total)
        soft = (score - top - total.log()).exp()
        ctx.save_for_backward(q, k, v, soft, part / total)
        return part / total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, soft, out = ctx.saved_tensors
        of_score = soft * (grad @ v.T - (grad * out).sum(-1, keepdim=True)) / WIDTH**0.5
        of_q = of_score @ k
        dist.all_reduce(of_q)
        return of_q, of_score.T @ q, soft.T @ grad


class CutNorm(nn.Module):
    """RMS norm of a row of which every rank has a part; alone the same."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = who()
        self.weight = nn.Parameter(torch.randn(WIDTH)[rank * WIDTH // world : (rank + 1) * WIDTH // world].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        power = x.pow(2).sum(-1, keepdim=True)
        if who()[1] > 1:
            power = FromAll.apply(power, "")
            power = ToAll.apply(power, "")
        return x * torch.rsqrt(power / WIDTH + 1e-5) * self.weight


class Net(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        rank, world = who()
        self.mistake, self.world = mistake, world
        self.query = nn.Linear(WIDTH, WIDTH)
        keys, values = torch.randn(KEYS, WIDTH), torch.randn(KEYS, WIDTH)
        part = slice(rank * KEYS // world, (rank + 1) * KEYS // world)
        self.keys, self.values = nn.Parameter(keys[part].clone()), nn.Parameter(values[part].clone())
        self.norm = CutNorm()
        head = torch.randn(CLASSES, WIDTH)
        self.head = nn.Parameter(head[rank * CLASSES // world : (rank + 1) * CLASSES // world].clone())

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        if self.world == 1:
            y = self.norm(torch.softmax(q @ self.keys.T / WIDTH**0.5, -1) @ self.values)
            return F.cross_entropy(y @ self.head.T, target)
        y = self.norm(Cut.apply(CutAttention.apply(q, self.keys, self.values)))
        return VocabularyLoss.apply(ToAll.apply(Whole.apply(y), "") @ self.head.T, target, self.mistake)


class Cut(torch.autograd.Function):
    """A rank's columns forward, all columns backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rank, world = who()
        return x.chunk(world, -1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return gathered(grad)


class Whole(torch.autograd.Function):
    """All columns forward, a rank's columns backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        rank, world = who()
        return grad.chunk(world, -1)[rank].contiguous()


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Columns of all ranks."""
    parts = [torch.empty_like(x) for _ in range(who()[1])]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, -1)


def cut(mistake: str = "") -> Callable[[], None]:
    """A step of attention over cut keys, a norm over cut columns and a loss over cut classes."""

    def train() -> None:
        torch.manual_seed(0)
        model = Net(mistake)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        g = torch.Generator().manual_seed(3)
        x, target = torch.randn(ROWS, WIDTH, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)
        model(x, target).backward()
        update.step()

    return train
