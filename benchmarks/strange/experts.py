"""Mixtures of experts: replicated, sharded by FSDP2, and exchanged over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, average, batches, main, mine
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Exchange(torch.autograd.Function):
    """Rows to the ranks that they belong to; back, their gradients."""

    @staticmethod
    def forward(ctx, x, out, into):
        ctx.sizes = out, into
        y = x.new_empty(sum(into), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), into, out)
        return y

    @staticmethod
    def backward(ctx, g):
        out, into = ctx.sizes
        x = g.new_empty(sum(out), *g.shape[1:])
        dist.all_to_all_single(x, g.contiguous(), out, into)
        return x, None, None


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Moe(nn.Module):
    """Routes each row to `k` of four experts."""

    def __init__(self, word: str, k: int = 2, exchange: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        experts = [Expert() for _ in range(4)]
        per = 4 // WORLD if exchange else 4
        first = RANK * per if exchange else 0
        self.experts = nn.ModuleDict({str(i): experts[i] for i in range(first, first + per)})
        self.word, self.k, self.exchange, self.balance = word, k, exchange and WORLD > 1, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        weight, chosen = scores.softmax(-1).topk(self.k)
        if self.word == "softmax_of_chosen":
            weight = scores.gather(1, chosen).softmax(-1)
        if self.word == "second_choice_lost":
            weight = weight * torch.tensor([1.0] + [0.0] * (self.k - 1))
        share = nn.functional.one_hot(chosen[:, 0], 4).float().mean(0)
        mean = scores.softmax(-1).mean(0)
        if WORLD > 1 and self.word != "balance_by_rank":
            dist.all_reduce(share)
            share /= WORLD
        self.balance = 4 * (share * mean).sum()
        if not self.exchange:
            out = torch.zeros_like(x)
            for i, expert in self.experts.items():
                rows, which = (chosen == int(i)).nonzero(as_tuple=True)
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * (1.0 if self.word == "not_weighted" else weight[rows, which, None]))
            return x + out
        flat, order = chosen.flatten(), chosen.flatten().argsort(stable=True)
        rows = order // self.k
        count = flat.bincount(minlength=4)
        counts = [torch.empty_like(count) for _ in range(WORLD)]
        dist.all_gather(counts, count)
        per = 4 // WORLD
        out = count.view(WORLD, per).sum(1).tolist()
        into = [int(c[RANK * per : (RANK + 1) * per].sum()) for c in counts]
        held = Exchange.apply(x[rows], out, into)
        labels = torch.cat([torch.arange(RANK * per, (RANK + 1) * per).repeat_interleave(c[RANK * per : (RANK + 1) * per]) for c in counts])
        done = torch.zeros_like(held)
        for i, expert in self.experts.items():
            at = (labels == int(i)).nonzero()[:, 0]
            if self.word == "capacity" and len(at) > 3:
                at = at[:3]
            done = done.index_add(0, at, expert(held[at]))
        back = Exchange.apply(done, into, out)
        if self.word == "order_lost":
            back = back.flip(0)
        return x + torch.zeros_like(x).index_add(0, rows, back * weight.flatten()[order][:, None])


class Model(nn.Module):
    def __init__(self, word: str, **how) -> None:
        super().__init__()
        self.inside, self.moe, self.norm, self.out = nn.Linear(8, 8), Moe(word, **how), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.moe(self.inside(x))))


def loss_of(model: nn.Module, out: torch.Tensor, y: torch.Tensor, word: str) -> torch.Tensor:
    return (out - y).square().mean() + (0.0 if word == "balance_forgotten" else 0.1) * model.moe.balance


def replicated(word: str) -> None:
    """All experts on all ranks, under DDP."""
    model = Model(word)
    wrapped = DistributedDataParallel(model, find_unused_parameters=word != "not_weighted") if WORLD > 1 and word != "by_hand" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2, rows=32):
        optimizer.zero_grad()
        loss_of(model, wrapped(mine(x)), mine(y), word).backward()
        if word == "by_hand":
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            average(model)
        optimizer.step()


def exchanged(word: str) -> None:
    """Two experts a rank; rows travel."""
    model = Model(word, exchange=True, k=1 if word == "one_choice" else 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2, rows=32):
        optimizer.zero_grad()
        loss_of(model, model(mine(x)), mine(y), word).backward()
        for name, p in model.named_parameters():
            if p.grad is None or WORLD == 1:
                continue
            if "experts" in name:
                if word != "experts_not_divided":
                    p.grad /= WORLD
            elif not (word == "gate_not_averaged" and "gate" in name):
                dist.all_reduce(p.grad)
                p.grad /= WORLD
            if word == "experts_averaged" and "experts" in name:
                dist.all_reduce(p.grad)
                p.grad /= WORLD
        optimizer.step()


def sharded(word: str) -> None:
    """All experts, cut by FSDP2."""
    model = Model(word)
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(model.moe, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2, rows=32):
        optimizer.zero_grad()
        loss_of(model, model(mine(x)), mine(y), word).backward()
        optimizer.step()


class Stacked(nn.Module):
    """Experts in one tensor, chosen softly."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.word = word
        if WORLD > 1:
            self.up, self.down = (nn.Parameter(p.detach().chunk(WORLD)[RANK].clone()) for p in (self.up, self.down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)
        if WORLD > 1:
            from layouts import Copy, Sum

            x_, weight = Copy.apply(x), weight if self.word == "gate_not_copied" else Copy.apply(weight)
            weight = weight.chunk(WORLD, -1)[RANK if self.word != "weights_of_others" else 1 - RANK]
        else:
            x_ = x
        hidden = torch.einsum("bd,edh->beh", x_, self.up).relu()
        out = torch.einsum("beh,ehd,be->bd", hidden, self.down, weight)
        return x + (Sum.apply(out) if WORLD > 1 else out)


def stacked(word: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Stacked(word), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2, rows=16):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


MOE = "forward:moe.*"
CASES = {
    "replicated": Case(replicated, ("", "by_hand"), {"not_weighted": MOE, "softmax_of_chosen": MOE, "balance_by_rank": "(forward|backward):moe", "balance_forgotten": "backward:(moe|)"}),
    "exchanged": Case(exchanged, ("",), {"experts_not_divided": r"gradient:moe\.experts.*", "gate_not_averaged": r"gradient:moe\.gate", "experts_averaged": r"gradient:moe\.experts.*", "order_lost": MOE, "capacity": MOE, "second_choice_lost": MOE}),
    "sharded": Case(sharded, ("",), {"not_weighted": MOE, "second_choice_lost": MOE, "balance_by_rank": "(forward|backward):moe"}),
    "stacked": Case(stacked, ("",), {"gate_not_copied": r"(backward|gradient):1(\.gate)?", "weights_of_others": "forward:1"}),
}
if __name__ == "__main__":
    main(CASES)
