"""What people do between backward and the update: clipping of their own, accumulation, adapters, mixed precision, optimizers of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Mlp, average, batches, main, mine
from torch import nn


def clipping(word: str) -> None:
    """A norm of one's own, over what ranks hold."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(1):
        (model(mine(x)) - mine(y)).square().mean().backward()
        if word != "before_average":
            average(model)
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        if WORLD > 1 and word == "summed_over_replicas":
            dist.all_reduce(norm)
        scale = (0.1 / (norm.sqrt() + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        if word == "before_average":
            average(model)
        if word == "twice":
            for p in model.parameters():
                p.grad.mul_(0.5)
        optimizer.step()


def by_value(word: str) -> None:
    """Clipping by value, of the averaged gradient or of each rank's own."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(1):
        (model(mine(x)) - mine(y)).square().mean().backward()
        if word != "each_rank":
            average(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        if word == "each_rank":
            average(model)
        optimizer.step()


def accumulation(word: str) -> None:
    """One batch, or microbatches; the model returns its loss."""

    class Lossy(Mlp):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) - y).square().mean()

    model, parts = Lossy(), 1 if WORLD == 1 or word == "one" else 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(1):
        for a, b in zip(mine(x).chunk(parts), mine(y).chunk(parts), strict=True):
            loss = model(a, b)
            (loss if word == "not_divided" else loss / parts).backward()
            if word == "cleared_between":
                optimizer.zero_grad()
        average(model)
        optimizer.step()


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, base.in_features) * 0.1), nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * 2.0


def lora(word: str) -> None:
    """Adapters on frozen layers, cut by FSDP2 where there are ranks."""
    model = Mlp()
    model.first, model.last = Lora(model.first), Lora(model.last)
    model.norm.requires_grad_(False)
    if WORLD > 1 and word != "replicated":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained[1:] if word == "one_adapter_left_out" else trained, lr=1e-3)
    for x, y in batches(2):
        loss = (model(mine(x)) - mine(y)).square().mean()
        (loss * 2 if word == "scaled" else loss).backward()
        if word == "replicated":
            average(model)
        optimizer.step()
        optimizer.zero_grad()


def autocast(word: str) -> None:
    """Mixed precision: bfloat16 by autocast, parameters in float32."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(mine(x))
        loss = (out.float() - mine(y)).square().mean() * 1024
        loss.backward()
        average(model)
        for p in model.parameters():
            p.grad /= 512 if word == "unscaled_wrongly" else 1024
        if word == "overflow_skipped_on_rank_1" and RANK == 1:
            continue
        optimizer.step()


def muon(word: str) -> None:
    """Orthogonal updates, iterated in bfloat16."""

    class Orthogonal(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    buf = state.setdefault("momentum", torch.zeros_like(p))
                    buf.mul_(0.9).add_(p.grad)
                    if p.ndim < 2:
                        p.sub_(group["lr"] * buf)
                        continue
                    x = (buf / (buf.norm() + 1e-7)).bfloat16()
                    for _ in range(4 if word == "fewer_iterations" else 5):
                        a = x @ x.mT
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                    scale = 1.0 if word == "no_scale" else max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                    p.sub_(group["lr"] * scale * x.float())

    model = Mlp()
    optimizer = Orthogonal(model.parameters(), lr=0.02)
    for x, y in batches(2):
        (model(mine(x)) - mine(y)).square().mean().backward()
        if word != "not_averaged":
            average(model)
        optimizer.step()
        optimizer.zero_grad()


def schedule(word: str) -> None:
    """Warm-up, no decay on norms and biases, a closure."""
    model = Mlp()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5 if word == "decay" else 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.1 if word == "decay_of_norms" else 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (i + 1) / 10)
    for x, y in batches(3):
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        if word == "stepped_twice":
            warm.step()
        warm.step()


CASES = {
    "lora": Case(lora, ("", "replicated"), {"one_adapter_left_out": "(gradient|update|model):first", "scaled": "(backward|gradient):"}),
    "accumulation": Case(accumulation, ("", "one"), {"not_divided": "(backward|gradient):", "cleared_between": "(forward|gradient|update):"}),
    "muon": Case(muon, ("",), {"fewer_iterations": "update:(first|last|)", "no_scale": "update:first", "not_averaged": "gradient:"}),
    "clipping": Case(clipping, ("",), {"summed_over_replicas": "gradient:", "before_average": "gradient:", "twice": "gradient:"}),
    "by_value": Case(by_value, ("",), {"each_rank": "gradient:"}),
    "autocast": Case(autocast, ("",), {"unscaled_wrongly": "gradient:", "overflow_skipped_on_rank_1": "update:"}),
    "schedule": Case(schedule, ("",), {"stepped_twice": "update:", "decay": "update:(first|last|)", "decay_of_norms": "update:(norm|first|last|)"}, steps=3),
}
if __name__ == "__main__":
    main(CASES)
