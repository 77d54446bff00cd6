"""FSDP2 in the ways that it is used: mixed precision, HSDP, accumulation, ties, and a reference with the same policy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import WORLD, Case, Gpt, main, mine, next_token, tokens
from torch import nn


def mesh(*sizes: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def summed(*modules) -> None:
    """Gradients are added up, not averaged."""
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def train(model: nn.Module, word: str, parts: int = 1, lr: float = 1e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for row in tokens(2):
        optimizer.zero_grad()
        for i, part in enumerate(mine(row).chunk(parts)):
            if hasattr(model, "set_requires_gradient_sync") and parts > 1:
                model.set_requires_gradient_sync(i == parts - 1 and word != "never_synced")
            loss = next_token(model(part[:, :-1]).float(), part)
            (loss if word == "not_divided" else loss / parts).backward()
        if word == "clipped_by_rank":
            grads = [p.grad.to_local() for p in model.parameters()]
            scale = (0.1 / torch.stack([g.norm() for g in grads]).norm()).clamp(max=1.0)
            for g in grads:
                g.mul_(scale)
        elif "clipped" in word:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def wrapped(word: str) -> None:
    """Layer by layer."""
    model = Gpt(tied=word.startswith("tied"))
    if WORLD > 1:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        how = {"mesh": mesh(WORLD)}
        if word == "kept_after_forward":
            how["reshard_after_forward"] = False
        if word == "offloaded":
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for layer in model.layers:
            fully_shard(layer, **how)
        if word != "only_layers":
            fully_shard(model, **how)
        if word == "not_averaged":
            summed(model, *model.layers)
        if word == "one_not_averaged":
            summed(model.layers[1])
    train(model, word)


def clipped(word: str) -> None:
    """With torch's clipping, over DTensors."""
    model = Gpt()
    if WORLD > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh(WORLD))
        fully_shard(model, mesh=mesh(WORLD))
    train(model, word or "clipped")


def accumulated(word: str) -> None:
    model = Gpt()
    if WORLD > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh(WORLD))
        fully_shard(model, mesh=mesh(WORLD))
    train(model, word, parts=2 if WORLD > 1 else 1)


def hybrid(word: str) -> None:
    """Two replicas of two shards."""
    model = Gpt()
    if WORLD > 1:
        from torch.distributed.fsdp import fully_shard

        both = mesh(2, 2)
        used = both["shard"] if word == "replicas_not_reduced" else both
        for layer in model.layers:
            fully_shard(layer, mesh=used)
        fully_shard(model, mesh=used)
    train(model, word)


def policy(word: str) -> None:
    """bfloat16 parameters; the reference has the same policy on one rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if WORLD == 1:
        import os

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Gpt()
    reduce = torch.bfloat16 if word == "reduced_in_bfloat16" else torch.float32
    how = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh(WORLD), mp_policy=how)
    fully_shard(model, mesh=mesh(WORLD), mp_policy=how)
    if word == "not_averaged":
        summed(model, *model.layers)
    train(model, word, lr=2e-3 if word == "rate" else 1e-3)
    if WORLD == 1:
        dist.destroy_process_group()


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapters(word: str) -> None:
    """Adapters on the queries and values; all else is frozen; each layer is cut."""
    model = Gpt().requires_grad_(False)
    for layer in model.layers:
        layer.attention.q, layer.attention.v = Adapter(layer.attention.q), Adapter(layer.attention.v)
    if word == "one_frozen":
        model.layers[0].attention.v.b.requires_grad_(False)
    if WORLD > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh(WORLD))
        if word != "layers_only":
            fully_shard(model, mesh=mesh(WORLD))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        if word == "merged_twice":
            with torch.no_grad():
                for layer in model.layers:
                    layer.attention.q.a.weight.mul_(1.1)
        optimizer.step()


CASES = {
    "wrapped": Case(wrapped, ("", "kept_after_forward", "offloaded"), {"not_averaged": "gradient:", "one_not_averaged": r"gradient:layers\.1\..*", "only_layers": "gradient:(embed|place|norm|head)", "clipped_by_rank": "gradient:"}),
    "tied": Case(lambda word: wrapped("tied" + word), ("",), {"_clipped_by_rank": "gradient:"}),
    "clipped": Case(clipped, ("",), {"clipped_by_rank": "gradient:"}),
    "accumulated": Case(accumulated, ("",), {"never_synced": "gradient:", "not_divided": "(gradient|backward):"}),
    "hybrid": Case(hybrid, ("",), {"replicas_not_reduced": "gradient:"}, world=4),
    "policy": Case(policy, ("",), {"not_averaged": "gradient:", "rate": "update:"}),
    "adapters": Case(adapters, ("", "layers_only"), {"one_frozen": r"(gradient|update|model):layers\.0\.attention\.v\.b", "merged_twice": r"update:layers\.[01]\.attention\.q\.a"}),
}
if __name__ == "__main__":
    main(CASES)
