"""Tensor, sequence and context parallelism: DTensor plans, and layers of people's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Copy, Gpt, Sum, average, main, next_token, tokens
from torch import nn


class Gather(torch.autograd.Function):
    """All parts of a dimension; back: this rank's part of the sum, or of its own."""

    @staticmethod
    def forward(ctx, x, dim, summed):
        ctx.dim, ctx.summed = dim, summed
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if ctx.summed:
            dist.all_reduce(g)
        return g.chunk(WORLD, ctx.dim)[RANK].contiguous(), None, None


def planned(word: str, sequence: bool = False) -> None:
    """torch's own plans."""
    model = Gpt()
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        for i, layer in enumerate(model.layers):
            plan = {
                "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(), "attention.o": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
                "mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
            }  # fmt: skip
            if word == "mlp_left_whole" and i:
                plan = {k: v for k, v in plan.items() if "mlp" not in k}
            if sequence:
                plan |= {
                    "norm1": SequenceParallel(), "norm2": SequenceParallel(),
                    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                }  # fmt: skip
            parallelize_module(layer, mesh, plan)
        if sequence:
            parallelize_module(model.layers, mesh, {"0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)})
            parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
        if word == "head_cut":
            parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())})
        if word == "heads_swapped_on_rank_1":
            with torch.no_grad():
                local = model.layers[0].attention.v.weight.to_local()
                if RANK == 1:
                    local.copy_(local.roll(4, 0).clone())
        if word == "output_scaled":
            model.layers[1].mlp.down.register_forward_hook(lambda m, a, out: out * (2 if RANK == 0 else 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        if word == "rows_by_rank":
            row = row.roll(RANK, 0)
        next_token(model(row[:, :-1]), row).backward()
        if word == "plain_parameters_averaged_wrongly":
            for p in (model.norm.weight, model.head.weight):
                p.grad *= WORLD
        optimizer.step()


def sequenced(word: str) -> None:
    planned(word, sequence=True)


class VocabEmbedding(nn.Module):
    def __init__(self, whole: nn.Embedding, word: str) -> None:
        super().__init__()
        self.weight, self.word = nn.Parameter(whole.weight.detach().chunk(WORLD)[RANK].clone()), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = len(self.weight)
        here = x - RANK * size
        outside = (here < 0) | (here >= size)
        out = nn.functional.embedding(here.clamp(0, size - 1), self.weight)
        if self.word != "mask_missing":
            out = out.masked_fill(outside[..., None], 0.0)
        return Sum.apply(out)


class VocabLoss(torch.autograd.Function):
    """Cross entropy of logits that are cut by vocabulary."""

    @staticmethod
    def forward(ctx, logits, target, word):
        most = logits.max(-1).values
        dist.all_reduce(most, dist.ReduceOp.MAX)
        shifted = (logits - most[:, None]).exp()
        sums = shifted.sum(-1)
        if word != "sum_of_own_part":
            dist.all_reduce(sums)
        size = logits.shape[1]
        here = target - RANK * size
        mine = (here >= 0) & (here < size)
        chosen = torch.where(mine, logits.gather(1, here.clamp(0, size - 1)[:, None])[:, 0] - most, 0.0)
        dist.all_reduce(chosen)
        grad = shifted / sums[:, None]
        grad[mine, here[mine]] -= 1.0
        ctx.save_for_backward(grad / len(target))
        return (sums.log() - chosen).mean()

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g, None, None


def vocabulary(word: str) -> None:
    """An embedding and a head that are cut by vocabulary."""
    model = Gpt()
    if WORLD > 1:
        model.embed = VocabEmbedding(model.embed, word)
        model.head.weight = nn.Parameter(model.head.weight.detach().chunk(WORLD)[RANK].clone())
        if word != "input_gradient_not_summed":
            model.norm.register_forward_hook(lambda m, a, out: Copy.apply(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        logits = model(row[:, :-1])
        loss = next_token(logits, row) if WORLD == 1 else VocabLoss.apply(logits.flatten(0, 1), row[:, 1:].flatten(), word)
        loss.backward()
        optimizer.step()


class Fused(nn.Module):
    """Grouped attention with one projection for all three."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.qkv, self.out, self.word = nn.Linear(16, 16 + 8 + 8), nn.Linear(16, 16), word
        self.heads, self.groups = 4 // WORLD, 2 // WORLD
        if WORLD > 1:
            sizes = (16, 8, 8)
            for name in ("weight", "bias"):
                held = getattr(self.qkv, name).detach()
                parts = [p.chunk(WORLD)[RANK] for p in held.split(sizes)]
                setattr(self.qkv, name, nn.Parameter(held.chunk(WORLD)[RANK].clone() if word == "cut_in_one" else torch.cat(parts)))
            self.out.weight = nn.Parameter(self.out.weight.detach().chunk(WORLD, 1)[RANK].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Copy.apply(x) if WORLD > 1 else x
        q, k, v = self.qkv(x).split((4 * self.heads, 4 * self.groups, 4 * self.groups), -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        repeat = self.heads // self.groups
        k, v = (t.repeat(1, repeat, 1, 1) if self.word == "groups_in_turn" else t.repeat_interleave(repeat, 1) for t in (k, v))
        scale = 0.25 if self.word == "scale_of_width" else None
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.word != "sees_all", scale=scale)
        out = nn.functional.linear(out.transpose(1, 2).flatten(2), self.out.weight)
        if WORLD > 1:
            out = Sum.apply(out + self.out.bias) if self.word == "bias_by_rank" else Sum.apply(out) + self.out.bias
            return out
        return out + self.out.bias


class Grouped(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Fused(word if i == 1 else "") for i in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.out.bias.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def grouped(word: str) -> None:
    model = Grouped(word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(row[:, :-1]), row).backward()
        optimizer.step()


class ContextAttention(nn.Module):
    """Queries of a part of the sequence, keys and values of all of it."""

    def __init__(self, whole: nn.Module, word: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.size, self.word = whole.q, whole.k, whole.v, whole.o, whole.size, word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.word != "own_part_only":
            k, v = (Gather.apply(t, 2, self.word != "gradient_of_own_part") for t in (k, v))
        n, whole = q.shape[2], k.shape[2]
        start = 0 if self.word in ("mask_from_zero", "own_part_only") else RANK * n
        mask = torch.arange(whole)[None, :] <= (torch.arange(n) + start)[:, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))


class PlacedGpt(Gpt):
    """Is told its positions."""

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place(where)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def context(word: str) -> None:
    model = PlacedGpt()
    if WORLD > 1:
        for layer in model.layers:
            layer.attention = ContextAttention(layer.attention, word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        x, y = row[:, :-1].chunk(WORLD, 1)[RANK], row[:, 1:].chunk(WORLD, 1)[RANK]
        where = torch.arange(x.shape[1]) + (0 if word == "positions_from_zero" else RANK * x.shape[1])
        loss = nn.functional.cross_entropy(model(x, where).flatten(0, 1), y.flatten())
        loss.backward()
        if word != "not_averaged":
            average(model)
        optimizer.step()


class SequenceLayer(nn.Module):
    """Norms on a part of the sequence, the rest by features."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.word = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False), word
        with torch.no_grad():
            self.norm.weight.normal_(1, 0.1)
        if WORLD > 1:
            self.up.weight, self.up.bias = (nn.Parameter(p.detach().chunk(WORLD)[RANK].clone()) for p in (self.up.weight, self.up.bias))
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(WORLD, 1)[RANK].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if WORLD > 1:
            h = Gather.apply(h, 1, self.word != "scatter_not_reduced")
        h = self.down(nn.functional.gelu(self.up(h)))
        if WORLD > 1:
            h = Sum.apply(h) if self.word != "own_part_of_sum" else h
            h = Part.apply(h)
        return x + h


class Part(torch.autograd.Function):
    """This rank's part of a sequence; back: of all parts."""

    @staticmethod
    def forward(ctx, x):
        return x.chunk(WORLD, 1)[RANK].contiguous()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(WORLD)]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts, 1)


def by_sequence(word: str) -> None:
    embed, head = nn.Embedding(32, 16), nn.Linear(16, 32)
    layers = nn.ModuleList(SequenceLayer(word if i == 0 else "") for i in range(2))
    model = nn.ModuleDict({"embed": embed, "layers": layers, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        x, y = row[:, :-1].chunk(WORLD, 1)[RANK], row[:, 1:].chunk(WORLD, 1)[RANK]
        h = embed(x)
        for layer in layers:
            h = layer(h)
        (nn.functional.cross_entropy(head(h).flatten(0, 1), y.flatten(), reduction="sum") / row[:, 1:].numel()).backward()
        if WORLD > 1:
            for name, p in model.named_parameters():
                whole = "norm" in name or "embed" in name or "head" in name
                if whole and not (word == "norms_not_reduced" and "norm" in name) and not (word == "head_not_reduced" and "head" in name):
                    dist.all_reduce(p.grad)
        optimizer.step()


def both(word: str) -> None:
    """FSDP2 over tensor parallelism, four ranks."""
    model = Gpt()
    dp, tp = 1, 1
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            plan = {f"attention.{n}": ColwiseParallel() for n in "qkv"} | {"attention.o": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        dp, tp = 2, mesh["dp"].get_local_rank()
        if word == "rows_by_tp":
            tp = mesh["tp"].get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        part = row.chunk(dp)[tp if WORLD > 1 else 0]
        loss = next_token(model(part[:, :-1]), part)
        (loss * 2 if word == "scaled_by_tp" else loss).backward()
        if word == "clipped_by_rank":
            norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.to_local().mul_((0.1 / norm).clamp(max=1.0))
        optimizer.step()


CASES = {
    "planned": Case(planned, ("", "head_cut", "mlp_left_whole"), {"output_scaled": r"forward:layers\.1\.mlp(\.down)?", "rows_by_rank": "forward:(embed|)", "plain_parameters_averaged_wrongly": "gradient:(norm|head)"}),
    "sequenced": Case(sequenced, ("",), {"output_scaled": r"forward:layers\.1\.mlp(\.down)?"}),
    "vocabulary": Case(vocabulary, ("",), {"mask_missing": "forward:embed", "sum_of_own_part": "backward:", "input_gradient_not_summed": "backward:(norm|head|)"}),
    "grouped": Case(grouped, ("",), {"cut_in_one": r"(model|forward):layers\.1(\.qkv)?", "groups_in_turn": r"forward:layers\.1", "scale_of_width": r"forward:layers\.1", "sees_all": r"forward:layers\.1", "bias_by_rank": r"forward:layers\.1"}),
    "context": Case(context, ("",), {"own_part_only": r"forward:layers\.0\.attention", "gradient_of_own_part": r"backward:layers\.1\.attention(\.[kv])?", "mask_from_zero": r"forward:layers\.0\.attention", "positions_from_zero": "forward:(place|)", "not_averaged": "gradient:"}),
    "by_sequence": Case(by_sequence, ("",), {"scatter_not_reduced": r"backward:layers\.0(\.norm|\.up)?", "own_part_of_sum": r"forward:layers\.0(\.down)?", "norms_not_reduced": r"gradient:layers\.[01]\.norm", "head_not_reduced": "gradient:head"}),
    "both": Case(both, ("",), {"rows_by_tp": "forward:(embed|)", "scaled_by_tp": "(backward|gradient):", "clipped_by_rank": "gradient:"}, world=4),
}
if __name__ == "__main__":
    main(CASES)
