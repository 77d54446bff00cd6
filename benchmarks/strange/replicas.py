"""Data parallelism by hand: replicas, master weights, buffers, and who of the ranks takes part."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from common import RANK, WORLD, Both, Case, Mlp, average, batches, main, mine
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def masters(word: str) -> None:
    """bfloat16 weights, float32 masters of the program's own."""
    exact = Mlp()
    if word != "same_start":
        with torch.no_grad():
            for p in exact.parameters():
                p.copy_(p.bfloat16())
    model = Mlp().bfloat16()
    model.load_state_dict(exact.state_dict())
    copies = [p.detach().clone().float() if word != "same_start" else q.detach().clone() for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    optimizer = torch.optim.AdamW(copies, lr=1e-3)
    for x, y in batches(3):
        loss = (model(mine(x).bfloat16()).float() - mine(y)).square().mean()
        loss.backward()
        average(model)
        for p, master in zip(model.parameters(), copies, strict=True):
            master.grad, p.grad = p.grad.float(), None
        if word == "rank_never_steps" and RANK == 1:
            continue
        optimizer.step()
        if word == "not_copied_back":
            continue
        with torch.no_grad():
            for i, (p, master) in enumerate(zip(model.parameters(), copies, strict=True)):
                if word == "one_not_copied_back" and i == 0:
                    continue
                if word == "truncated":
                    bits = master.view(torch.int32) & -65536
                    p.copy_(bits.view(torch.float32))
                    continue
                p.copy_(master)


def masters_better(word: str) -> None:
    """Masters made before the weights were rounded: they are not the weights' bits."""
    model = Mlp()
    copies = [p.detach().clone() for p in model.parameters()]
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(copies, lr=1e-3)
    for x, y in batches(3):
        (model(mine(x).bfloat16()).float() - mine(y)).square().mean().backward()
        average(model)
        for p, master in zip(model.parameters(), copies, strict=True):
            master.grad, p.grad = p.grad.float() * (1.5 if word == "scaled_gradient" else 1.0), None
        if word == "rank_never_steps" and RANK == 1:
            continue
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), copies, strict=True):
                if word != "not_copied_back":
                    p.copy_(master)


def sgd(word: str) -> None:
    """Plain data parallelism, averaged by hand."""
    if word == "not_broadcast" and RANK == 1:
        torch.manual_seed(7)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(batches(6)):
        (model(mine(x)) - mine(y)).square().mean().backward()
        if not (word == "late_no_average" and step >= 3):
            average(model)
        if word == "late_skip" and step >= 4 and RANK == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def crash(word: str) -> None:
    """A program that ends by an exception."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2):
        loss = (model(mine(x)) - mine(y)).square().mean()
        if word == "in_forward":
            raise RuntimeError("the shapes of nothing fit")
        loss.backward()
        if word == "after_backward":
            raise ValueError("no gradient today")
        average(model)
        optimizer.step()
        optimizer.zero_grad()


class Normed(nn.Module):
    def __init__(self, sync: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), Synced(16) if sync else nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Synced(nn.Module):
    """Batch norm over the ranks, since torch's own needs a GPU."""

    def __init__(self, width: int, momentum: float = 0.1, mean_only: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("seen", torch.tensor(0))
        self.momentum, self.local = momentum, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            mean, var = self.running_mean, self.running_var
        else:
            sums = torch.stack([x.sum(0), x.square().sum(0)])
            n = len(x)
            if WORLD > 1:
                sums, n = Both.apply(sums), n * WORLD
            mean, var = sums[0] / n, sums[1] / n - (sums[0] / n).square()
            with torch.no_grad():
                seen_mean = x.mean(0) if self.local else mean
                self.running_mean.lerp_(seen_mean, self.momentum)
                self.running_var.lerp_(var * n / (n - 1), self.momentum)
                self.seen += 1
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


def syncbn(word: str) -> None:
    model = Normed(sync=True)
    if WORLD > 1:
        model.norm.momentum = 0.2 if word == "momentum" else 0.1
        model.norm.local = word == "local_statistics"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2):
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        if word == "reset_each_step":
            model.norm.running_mean.zero_()


def ema(word: str) -> None:
    """A model that keeps an average of its own activations for a codebook, as VQ-VAE does."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nearest = torch.cdist(x.detach(), self.codes).min(-1).indices
            sums = torch.zeros(4, 9).index_add(0, nearest, torch.cat([x.detach(), torch.ones(len(x), 1)], 1))
            if WORLD > 1 and word != "not_reduced":
                dist.all_reduce(sums)
            found = self.codes[nearest]
            if word != "never_updated" or WORLD == 1:
                self.codes.lerp_(sums[:, :8] / sums[:, 8:].clamp(min=1), 0.1)
            return x + (found - x).detach()

    model = nn.Sequential(nn.Linear(8, 8), Codebook(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2):
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()


def ddp(word: str) -> None:
    model = Mlp()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2):
        rows = (x, y) if word == "whole_batch_each" else (mine(x), mine(y))
        if word == "same_rows":
            rows = (x.chunk(WORLD)[0], y.chunk(WORLD)[0])
        loss = (wrapped(rows[0]) - rows[1]).square()
        (loss.sum() if word == "sum_loss" else loss.mean()).backward()
        if word == "no_step_on_rank_1" and RANK == 1:
            continue
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    "masters": Case(masters, ("",), {"rank_never_steps": "update:.*", "not_copied_back": "update:.*", "one_not_copied_back": "update:first", "truncated": "update:.*"}),
    "masters_exact": Case(masters, ("same_start",), reference="same_start"),
    "masters_better": Case(masters_better, ("",), {"rank_never_steps": "update:.*", "not_copied_back": "update:.*", "scaled_gradient": "gradient:"}),
    "sgd": Case(sgd, ("",), {"not_broadcast": "model:.*"}),
    "sgd_steps": Case(sgd, ("",), {"late_no_average": "gradient:", "late_skip": "update:"}, steps=6),
    "syncbn": Case(syncbn, ("",), {"momentum": "forward:norm", "local_statistics": "forward:norm"}),
    "ema": Case(ema, ("",), {"not_reduced": "forward:1", "never_updated": "forward:1"}),
    "ddp": Case(ddp, ("", "whole_batch_each"), {"sum_loss": "(gradient|backward):", "same_rows": "forward:", "no_step_on_rank_1": "update:"}),
}
if __name__ == "__main__":
    main(CASES if "--list" in sys.argv else {**CASES, "crash": Case(crash, (), {"in_forward": "", "after_backward": ""})})
