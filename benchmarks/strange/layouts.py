"""Models that are cut by hand: columns and rows, FSDP2, stages that are copies of the whole."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Copy, Mlp, Sum, batches, main, mine
from torch import nn


class Block(nn.Module):
    """A residual block whose hidden features are cut over the ranks."""

    def __init__(self, word: str, p: float = 0.0) -> None:
        super().__init__()
        up, down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.norm, self.up, self.down, self.drop, self.word = nn.LayerNorm(8), up, down, nn.Dropout(p), word
        if WORLD > 1:
            part = (RANK + 1) % WORLD if word == "columns_swapped" else RANK
            up.weight, up.bias = nn.Parameter(up.weight.detach().chunk(WORLD)[part].clone()), nn.Parameter(up.bias.detach().chunk(WORLD)[RANK].clone())
            down.weight = nn.Parameter(down.weight.detach().chunk(WORLD, 1)[RANK].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if WORLD > 1 and self.word != "input_gradient_not_reduced":
            h = Copy.apply(h)
        h = self.drop(nn.functional.gelu(self.up(h)))
        if WORLD == 1 or self.word == "bias_each_rank":
            h = self.down(h)
            return x + (Sum.apply(h) if WORLD > 1 else h)
        h = nn.functional.linear(h, self.down.weight)
        return x + (h if self.word == "not_reduced" else Sum.apply(h)) + self.down.bias


def columns(word: str, p: float = 0.0) -> None:
    model = nn.Sequential(Block(word, p), Block("" if word == "one" else word, p), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed = 5 if word == "one_seed" else 5 + RANK
    torch.manual_seed(seed)
    for x, y in batches(2, rows=16):
        (model(x) - y).square().mean().backward()
        if word == "norm_on_rank_1_scaled" and RANK == 1:
            model[0].norm.weight.grad *= 3
        optimizer.step()
        optimizer.zero_grad()


def dropped(word: str) -> None:
    columns(word, 0.2)


def fsdp(word: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), Mlp(16), nn.Linear(4, 4))
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        more = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if word == "bfloat16" else {}
        fully_shard(model[2], mesh=mesh, **more)
        if word != "outer_not_cut":
            fully_shard(model, mesh=mesh, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if word == "rate" else 1e-3)
    for x, y in batches(2):
        rows = (x, y) if word == "all_rows" else (mine(x), mine(y))
        loss = (model(rows[0]).float() - rows[1]).square()
        (loss.sum() if word == "sum" else loss.mean()).backward()
        if word in ("clipped",):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleDict({str(i): Mlp8() for i in range(4)})
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


class Mlp8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stages(word: str) -> None:
    """Stages that are copies of the whole with parts taken out; with `two` several on a rank."""
    whole = Deep()
    if WORLD == 1:
        chunks = [whole]
    else:
        count = WORLD * (2 if word in ("two", "two_swapped") else 1)
        chunks = []
        for number in range(RANK, count, WORLD):
            stage = copy.deepcopy(whole)
            keep = range(number * 4 // count, (number + 1) * 4 // count)
            for i in range(4):
                if i not in keep:
                    del stage.layers[str(i)]
            if number:
                stage.embed = None
            if number < count - 1:
                stage.head = None
            chunks.append(stage)
    optimizer = torch.optim.SGD([p for c in chunks for p in c.parameters()], lr=0.1)
    for x, y in batches(1):
        passed, inputs = [], []
        for i in range(len(chunks)):
            if WORLD > 1 and (RANK or i):
                h = torch.empty(8, 8)
                dist.recv(h, (RANK - 1) % WORLD)
                h.requires_grad_()
            else:
                h = x
            inputs.append(h)
            out = chunks[i](h)
            passed.append(out)
            last = WORLD == 1 or (RANK == WORLD - 1 and i == len(chunks) - 1)
            if not last:
                dist.send(out.detach(), (RANK + 1) % WORLD)
        for i in reversed(range(len(chunks))):
            last = WORLD == 1 or (RANK == WORLD - 1 and i == len(chunks) - 1)
            if last:
                (passed[i] - y).square().mean().backward()
            else:
                g = torch.empty(8, 8)
                dist.recv(g, (RANK + 1) % WORLD)
                passed[i].backward(g * 2 if word == "gradient_twice" else g)
            if inputs[i] is not x:
                dist.send(inputs[i].grad, (RANK - 1) % WORLD)
        optimizer.step()


CASES = {
    "columns": Case(columns, ("",), {"columns_swapped": r"(model|forward):0\.up", "input_gradient_not_reduced": r"backward:1(\.norm|\.up)?", "bias_each_rank": r"forward:0(\.down)?", "not_reduced": r"forward:0(\.down)?", "norm_on_rank_1_scaled": r"gradient:0\.norm"}),
    "stages": Case(stages, ("", "two"), {"gradient_twice": r"(backward|gradient):(layers\.[12])?"}),
    "dropped": Case(dropped, ("",), {"one_seed": r"forward:0\.drop"}),
    "fsdp": Case(fsdp, ("", "all_rows"), {"sum": "(gradient|backward):", "rate": "update:", "clipped": "gradient:", "outer_not_cut": "gradient:[03]"}),
}
if __name__ == "__main__":
    main(CASES)
