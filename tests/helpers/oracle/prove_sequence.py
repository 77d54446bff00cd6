"""Programs with a cut sequence, each with two mistakes: keys that go round a ring of sends, and heads that are exchanged for positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as spread
import torch.nn.functional as F
from torch import nn

from helpers.oracle.prove_programs import who


class Ring(torch.autograd.Function):
    """Causal attention; a softmax of parts, each by the largest score so far."""

    @staticmethod
    def passed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """To the next rank, from the one before."""
        rank, world = who()
        found = [torch.empty_like(t) for t in tensors]
        calls = [dist.P2POp(op, t, peer % world) for a, b in zip(tensors, found) for op, t, peer in ((dist.isend, a.contiguous(), rank + 1), (dist.irecv, b, rank - 1))]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return found

    @staticmethod
    def scores(q: torch.Tensor, k: torch.Tensor, own: bool) -> torch.Tensor:
        """Own keys are masked."""
        found = q @ k.T * q.shape[-1] ** -0.5
        return found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), float("-inf")) if own else found

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mistake: str) -> torch.Tensor:
        rank, world = who()
        most, total, out = torch.full((len(q), 1), float("-inf")), torch.zeros(len(q), 1), torch.zeros_like(q)
        here = [k, v]
        for turn in range(world):
            if turn <= rank:
                score = Ring.scores(q, here[0], turn == 0)
                new = torch.maximum(most, score.amax(-1, keepdim=True))
                e, scale = (score - new).exp(), (most - new).exp()
                out = (out if mistake == "not scaled again" else out * scale) + e @ here[1]
                total, most = total * scale + e.sum(-1, keepdim=True), new
            if turn < world - 1:
                here = Ring.passed(here)
        out = out / total
        ctx.save_for_backward(q, k, v, out, most + total.log())
        ctx.mistake = mistake
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log = ctx.saved_tensors
        rank, world = who()
        of_q, inner = torch.zeros_like(q), (grad * out).sum(-1, keepdim=True)
        here = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for turn in range(world):
            if turn <= rank:
                odds = (Ring.scores(q, here[0], turn == 0) - log).exp()
                of_score = odds * (grad @ here[1].T - inner) * q.shape[-1] ** -0.5
                of_q = of_q + of_score @ here[0]
                here[2], here[3] = here[2] + of_score.T @ q, here[3] + odds.T @ grad
            if turn < world - 1 or ctx.mistake != "not sent home":
                here = Ring.passed(here)
        return of_q, here[2], here[3], None


class Attention(nn.Module):
    """By a ring where there are several ranks; a key's bias has no gradient but rounding."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.norm, self.mistake = nn.LayerNorm(4), mistake
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = self.query(h), self.key(h), self.value(h)
        if who()[1] == 1:
            return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])
        return x + self.out(Ring.apply(q, k, v, self.mistake))


class Exchanged(nn.Module):
    """Positions over ranks outside attention, heads within; rotary positions; a sequence that is padded to fit."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.word, self.norm = nn.Embedding(7, 8), nn.RMSNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 7, bias=False)

    def turned(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """By its position."""
        angle = torch.outer(torch.arange(first, first + x.shape[1], dtype=x.dtype), 10.0 ** -torch.arange(x.shape[-1] // 2, dtype=x.dtype))
        cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def swapped(self, x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        """All ranks' parts of one dimension for a part of another."""
        world = who()[1]
        if world == 1:
            return x
        parts = [part.contiguous() for part in x.chunk(world, cut)]
        return torch.cat(list(spread.all_to_all([torch.empty_like(part) for part in parts], parts)), joined)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rank, world = who()
        padding = -tokens.shape[1] % world
        each = (tokens.shape[1] + padding) // world
        mine = slice(rank * each, (rank + 1) * each)
        target = F.pad(target, (0, padding), value=0 if self.mistake == "padding counts" else -100)[:, mine]
        x = self.word(F.pad(tokens, (0, padding))[:, mine])
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        first = 0 if self.mistake == "no offset" else rank * each
        q, k, v = (self.swapped(t, 2, 1).transpose(1, 2) for t in (self.turned(q, first), self.turned(k, first), v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(self.swapped(found, 1, 2).flatten(-2))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def _reduced(model: nn.Module) -> None:
    for parameter in model.parameters():
        if who()[1] > 1:
            dist.all_reduce(parameter.grad)


def ring(mistake: str = "") -> Callable[[], None]:
    """A step of attention whose keys go round."""

    def train() -> None:
        torch.manual_seed(0)
        rank, world = who()
        model = Attention(mistake)
        update = torch.optim.Adam(model.parameters(), lr=0.1)
        x, y = (t.chunk(world)[rank] for t in torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(3)))
        (F.mse_loss(model(x), y, reduction="sum") / 24).backward()
        _reduced(model)
        update.step()

    return train


def exchanged(mistake: str = "") -> Callable[[], None]:
    """A step of attention whose heads are exchanged for positions; five tokens do not fit two ranks."""

    def train() -> None:
        torch.manual_seed(0)
        model = Exchanged(mistake)
        update = torch.optim.AdamW(model.parameters(), lr=0.05)
        text = torch.randint(0, 7, (2, 6), generator=torch.Generator().manual_seed(1))
        loss, count = model(text[:, :-1], text[:, 1:])
        if who()[1] > 1:
            dist.all_reduce(count)
        (loss / count).backward()
        _reduced(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update.step()

    return train
