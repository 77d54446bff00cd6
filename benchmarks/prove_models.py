"""A transformer as Megatron cuts it, by hand, with ordinary `torch.distributed` calls: what `prove_table.py` judges on large meshes.

Embedding and loss cut along the vocabulary, attention (rotary positions, causal) along heads, SwiGLU along its inner width, or experts (two of
them a token) over the same ranks; stages by one forward, one backward, sent and received; gradients averaged over data parallel ranks;
AdamW. On one device the same program is the reference: one microbatch, nothing sent. A rank's place: `((pp · DP) + dp) · TP + tp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn


class Size(msgspec.Struct):
    """Layers and the mesh; `mistake`: one of `MISTAKES`, or "". Widths are small, and follow from `tp`: two heads and two experts a rank."""

    layers: int = 2
    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    experts: bool = False
    rows: int = 1
    tokens: int = 2
    mistake: str = ""

    @property
    def width(self) -> int:
        """Of activations: two elements a head."""
        return 2 * self.heads

    @property
    def heads(self) -> int:
        """Of attention."""
        return 2 * self.tp

    @property
    def vocabulary(self) -> int:
        """Tokens there are."""
        return 4 * self.tp

    @property
    def mesh(self) -> str:
        """As `prove` wants it."""
        return f"pp={self.pp},dp={self.dp},tp={self.tp}"


MISTAKES = ("backward sum missing", "forward sum missing", "sum for average", "wrong data group", "microbatch scale", "same shard", "same rows", "layers swapped", "last microbatch left out", "gate not summed", "one layer", "one microbatch", "one rank", "last rank")


class Ranks:
    """This rank's place and groups; without a process group, one rank of each."""

    def __init__(self, size: Size) -> None:
        self.size, there = size, dist.is_initialized()
        rank = dist.get_rank() if there else 0
        self.dps, self.tps, self.pps, self.microbatches = (size.dp, size.tp, size.pp, size.microbatches) if there else (1, 1, 1, 1)
        self.tp, self.dp, self.pp = rank % self.tps, rank // self.tps % self.dps, rank // self.tps // self.dps
        self.tensor: Any = None
        self.data: Any = None
        self.stride = self.dps * self.tps
        if there:
            first = self.pp * self.stride
            near = [first + self.dp * self.tps + k for k in range(self.tps)]
            across = [first + k * self.tps + self.tp for k in range(self.dps)]
            if size.mistake == "wrong data group":
                across = list(range(first, first + self.stride))
            self.tensor = dist.new_group(near, use_local_synchronization=True) if self.tps > 1 else None
            self.data = dist.new_group(across, use_local_synchronization=True) if self.dps > 1 else None
        self.rank, self.mistake = rank, size.mistake if there else ""

    def part(self, whole: torch.Tensor, dim: int) -> nn.Parameter:
        """A rank's own part of a parameter."""
        place = 0 if self.mistake == "same shard" and dim == 1 else self.tp
        return nn.Parameter(whole.chunk(self.tps, dim)[place].clone())


class ToAll(torch.autograd.Function):
    """Identity forward, sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, missing: bool) -> torch.Tensor:
        ctx.ranks, ctx.missing = ranks, missing
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.ranks.tensor is not None and not ctx.missing:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.ranks.tensor)
        return grad, None, None


class FromAll(torch.autograd.Function):
    """Sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, missing: bool) -> torch.Tensor:
        if ranks.tensor is not None and not missing:
            x = x.clone()
            dist.all_reduce(x, group=ranks.tensor)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class Norm(nn.Module):
    """By the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Heads over ranks."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        width, self.ranks = ranks.size.width, ranks
        for name in ("query", "key", "value"):
            setattr(self, name, ranks.part(torch.randn(width, width) * 0.3, 0))
        self.out = ranks.part(torch.randn(width, width) * 0.3, 1)
        at = torch.arange(ranks.size.tokens, dtype=torch.float32)
        self.cos, self.sin = torch.cos(at)[:, None], torch.sin(at)[:, None]
        self.late = torch.ones(ranks.size.tokens, ranks.size.tokens, dtype=torch.bool).triu(1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """By its position."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens = x.shape[:2]
        x = ToAll.apply(x, self.ranks, self.ranks.mistake == "backward sum missing")
        q, k, v = ((x @ w.t()).view(rows, tokens, -1, 2).transpose(1, 2) for w in (self.query, self.key, self.value))
        scores = self.turned(q) @ self.turned(k).transpose(-1, -2) * 2**-0.5
        found = scores.masked_fill(self.late, float("-inf")).softmax(-1) @ v
        return FromAll.apply(found.transpose(1, 2).reshape(rows, tokens, -1) @ self.out.t(), self.ranks, False)


class Inner(nn.Module):
    """SwiGLU, its inner width over ranks."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        super().__init__()
        width, self.ranks = ranks.size.width, ranks
        self.missing = ranks.mistake == "forward sum missing" or (ranks.mistake == "one layer" and number == ranks.size.layers // 2)
        self.gate, self.up = (ranks.part(torch.randn(2 * width, width) * 0.3, 0) for _ in range(2))
        self.down = ranks.part(torch.randn(width, 2 * width) * 0.3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ToAll.apply(x, self.ranks, False)
        return FromAll.apply((nn.functional.silu(x @ self.gate.t()) * (x @ self.up.t())) @ self.down.t(), self.ranks, self.missing)


class Experts(nn.Module):
    """Two of the experts a token, and one for all; a rank computes its own for all tokens, and weighs them by the gate."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        super().__init__()
        size, self.ranks = ranks.size, ranks
        self.router = nn.Parameter(torch.randn(2 * size.tp, size.width))
        self.up = ranks.part(torch.randn(2 * size.tp, size.width, size.width) * 0.3, 0)
        self.down = ranks.part(torch.randn(2 * size.tp, size.width, size.width) * 0.3, 0)
        self.shared = Inner(ranks, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odds = (x @ self.router.t()).softmax(-1)
        chosen = torch.zeros_like(odds).scatter(-1, odds.topk(2, -1).indices, 1.0)
        gate = ToAll.apply(odds * chosen, self.ranks, self.ranks.mistake == "gate not summed")
        given = ToAll.apply(x, self.ranks, False)
        each, found = len(self.up), torch.zeros_like(x)
        for k in range(each):
            found = found + (nn.functional.silu(given @ self.up[k].t()) @ self.down[k].t()) * gate[..., self.ranks.tp * each + k, None]
        return FromAll.apply(found, self.ranks, False) + self.shared(x)


class Layer(nn.Module):
    """Attention and what comes after it."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        super().__init__()
        self.first, self.attention = Norm(ranks.size.width), Attention(ranks)
        self.second, self.inner = Norm(ranks.size.width), Experts(ranks, number) if ranks.size.experts else Inner(ranks, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.inner(self.second(x))


class Embedding(nn.Module):
    """Rows of the vocabulary over ranks."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.ranks = ranks.part(torch.randn(ranks.size.vocabulary, ranks.size.width), 0), ranks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        here = tokens - self.ranks.tp * len(self.weight)
        other = (here < 0) | (here >= len(self.weight))
        found = nn.functional.embedding(here.masked_fill(other, 0), self.weight)
        return FromAll.apply(found.masked_fill(other[..., None], 0.0), self.ranks, False)


class Head(nn.Module):
    """Logits of a part of the vocabulary, and the loss from all parts."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.norm, self.ranks = Norm(ranks.size.width), ranks
        self.weight = ranks.part(torch.randn(ranks.size.vocabulary, ranks.size.width) * 0.3, 0)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = ToAll.apply(self.norm(x), self.ranks, False) @ self.weight.t()
        most = logits.detach().amax(-1, keepdim=True)
        if self.ranks.tensor is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.ranks.tensor)
        low = logits - most
        total = FromAll.apply(low.exp().sum(-1), self.ranks, False)
        here = target - self.ranks.tp * len(self.weight)
        other = (here < 0) | (here >= len(self.weight))
        picked = low.gather(-1, here.masked_fill(other, 0)[..., None])[..., 0].masked_fill(other, 0.0)
        return (total.log() - FromAll.apply(picked, self.ranks, False)).mean()


class Stage(nn.Module):
    """Layers of the whole model under their own names; embedding on the first stage, loss on the last."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        size = ranks.size
        keep = [k for k in range(size.layers) if k * ranks.pps // size.layers == ranks.pp]
        state = torch.random.get_rng_state()
        self.embedding = Embedding(ranks) if ranks.pp == 0 else None
        self.layers = nn.ModuleDict()
        for k in keep:
            torch.manual_seed(100 + k)
            self.layers[str(k)] = Layer(ranks, k)
        torch.manual_seed(99)
        self.head = Head(ranks) if ranks.pp == ranks.pps - 1 else None
        torch.random.set_rng_state(state)
        self.order = list(self.layers)
        if ranks.mistake == "layers swapped" and len(self.order) > 1:
            self.order[:2] = self.order[1::-1]

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for name in self.order:
            x = self.layers[name](x)
        return x if self.head is None else self.head(x, target)


def step(size: Size) -> Callable[[], None]:
    """One step of training; on one device all rows are one microbatch."""

    def train() -> None:
        ranks = Ranks(size)
        torch.manual_seed(7)
        model = Stage(ranks)
        update = torch.optim.AdamW(model.parameters(), lr=0.1)
        count = size.dp * size.microbatches
        batch = torch.randint(0, size.vocabulary, (count, size.rows, size.tokens + 1), generator=torch.Generator().manual_seed(3))
        if ranks.stride * ranks.pps == 1:
            model(batch[:, :, :-1].flatten(0, 1), batch[:, :, 1:].flatten(0, 1)).backward()
        else:
            place = 0 if ranks.mistake == "same rows" else ranks.dp
            schedule(model, ranks, batch[place * size.microbatches : (place + 1) * size.microbatches])
        for parameter in model.parameters():
            if ranks.data is not None:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=ranks.data)
                if ranks.mistake != "sum for average":
                    odd = {"one rank": ranks.stride > 1 and ranks.rank == ranks.tps, "last rank": ranks.rank == ranks.stride * ranks.pps - 1}.get(ranks.mistake, False)
                    parameter.grad /= ranks.dps * (2 if odd else 1)
        update.step()

    return train


def schedule(model: Stage, ranks: Ranks, batch: torch.Tensor) -> None:
    """One forward, one backward."""
    size, waiting, done = ranks.size, [], []

    def forward(k: int) -> None:
        given = batch[k][:, :-1]
        if ranks.pp > 0:
            given = torch.zeros(size.rows, size.tokens, size.width)
            dist.recv(given, ranks.rank - ranks.stride)
            given.requires_grad_()
        found = model(given, batch[k][:, 1:])
        if ranks.pp < ranks.pps - 1:
            dist.isend(found.detach().clone(), ranks.rank + ranks.stride)
        waiting.append((given, found))

    def backward() -> None:
        given, found = waiting.pop(0)
        done.append(given)
        if ranks.pp == ranks.pps - 1:
            wrong = ranks.mistake == "microbatch scale" or (ranks.mistake == "one microbatch" and len(done) == 1)
            (found / (1 if wrong else ranks.microbatches)).backward()
        else:
            grad = torch.zeros(size.rows, size.tokens, size.width)
            dist.recv(grad, ranks.rank + ranks.stride)
            found.backward(grad)
        if ranks.pp > 0:
            dist.isend(given.grad.clone(), ranks.rank - ranks.stride)

    ahead = min(ranks.microbatches, ranks.pps - ranks.pp)
    for k in range(ahead):
        forward(k)
    for k in range(ahead, ranks.microbatches):
        backward()
        forward(k)
    while waiting and not (ranks.mistake == "last microbatch left out" and len(waiting) == 1):
        backward()
