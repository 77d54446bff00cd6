"""Sequence and expert parallelism: rings, exchanges of heads for positions, experts over ranks."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from . import Step, checkout, group_of_one, normal, numbers, program, stub, tokens, who

WIDTH, HEADS, LENGTH, CLASSES = 8, 2, 4, 8


class Attending(nn.Module):
    """A network with one attention of somebody's; `attend(q, k, v)` as (rows, positions, heads, elements)."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).contiguous() for t in self.qkv(self.norm(h)).chunk(3, -1))
        return self.head(h + self.out(self.attend(q, k, v).flatten(2)))  # type: ignore[no-any-return]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal).transpose(1, 2)


def over_positions(attend: Any, causal: bool) -> None:
    """A step of a rank that has a part of all rows' positions."""
    rank, world = who()
    model = Attending(attend if world > 1 else lambda q, k, v: attention(q, k, v, causal))
    normal(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, target = (t.chunk(world, 1)[rank] for t in tokens(2, LENGTH, CLASSES))
    F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
    for parameter in model.parameters():
        if world > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()


def _kernels() -> None:
    """A kernel of a GPU, and its backward, which it has not, by their mathematical definition."""
    from yunchang.kernels import attention as kernels
    from yunchang.ring import ring_pytorch_attn

    def weights(q: Any, k: Any, scale: float, causal: bool) -> torch.Tensor:
        scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) * scale
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")) if causal else scores

    def forward(q: Any, k: Any, v: Any, softmax_scale: float, causal: bool, **named: Any) -> Any:
        scores = weights(q, k, softmax_scale, causal)
        return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).contiguous(), scores.logsumexp(-1)

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, softmax_scale: float, causal: bool, **named: Any) -> Any:
        odds = (weights(q, k, softmax_scale, causal) - softmax_lse.transpose(1, 2)[..., None]).exp()
        g, given = grad.transpose(1, 2), (grad * out).sum(-1).transpose(1, 2)[..., None]
        slopes = odds * (g @ v.transpose(1, 2).transpose(-1, -2) - given) * softmax_scale
        of_q, of_k, of_v = slopes @ k.transpose(1, 2), slopes.transpose(-1, -2) @ q.transpose(1, 2), odds.transpose(-1, -2) @ g
        return tuple(t.transpose(1, 2).contiguous() for t in (of_q, of_k, of_v))

    theirs = ring_pytorch_attn.RingAttentionFunc.backward
    if not hasattr(theirs, "whole"):  # it leaves out the gradient of the group, its first input, which torch refuses

        def whole(ctx: Any, grad: torch.Tensor) -> Any:
            return (None, *theirs(ctx, grad))

        whole.whole = True  # type: ignore[attr-defined]
        ring_pytorch_attn.RingAttentionFunc.backward = staticmethod(whole)
    for module in (kernels, ring_pytorch_attn):
        module.pytorch_attn_forward, module.pytorch_attn_backward = forward, backward


def yunchang(ring: bool, causal: bool) -> Step:
    def step() -> None:
        attend: Any = None
        if dist.is_initialized():
            checkout("feifeibear/long-context-attention")
            from yunchang.kernels import AttnType

            _kernels()

            if ring:
                from yunchang.ring.ring_pytorch_attn import ring_pytorch_attn_func

                attend = lambda q, k, v: ring_pytorch_attn_func(q, k, v, causal=causal, group=dist.group.WORLD)  # noqa: E731
            else:
                from yunchang.ulysses.attn_layer import UlyssesAttention

                layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
                layer.attn_fn = lambda q, k, v, causal, **named: attention(q, k, v, causal)
                attend = lambda q, k, v: layer(q, k, v, causal=causal)  # noqa: E731
        over_positions(attend, causal)

    return step


program("yunchang, exchange of heads", "feifeibear/long-context-attention", "cp=2")(lambda: yunchang(False, True))
program("yunchang, ring", "feifeibear/long-context-attention", "cp=2")(lambda: yunchang(True, False))
program("yunchang, causal ring", "feifeibear/long-context-attention", "cp=2")(lambda: yunchang(True, True))


def ring(causal: bool, striped: bool) -> Step:
    """lucidrains' transformer, as its own test runs it: the whole batch on all ranks, which it cuts and puts together."""

    def step() -> None:
        checkout("lucidrains/ring-attention-pytorch")
        for name in [n for n in sys.modules if n.startswith("ring_attention_pytorch")]:
            sys.modules.pop(name)  # it remembers the rank
        stub("beartype", beartype=lambda f: f)
        RingTransformer = importlib.import_module("ring_attention_pytorch.ring_attention").RingTransformer
        world = who()[1]
        torch.manual_seed(0)
        net = RingTransformer(
            num_tokens=CLASSES, dim=WIDTH, causal=causal, depth=1, heads=2, dim_head=4, num_grouped_query_heads=1, ring_attn=world > 1, striped_ring_attn=striped and world > 1,
            ring_seq_size=LENGTH // 2, bucket_size=LENGTH // 2, force_regular_attn=world == 1, use_cuda_kernel=False,
        )
        normal(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, target = tokens(2, LENGTH, CLASSES)
        F.cross_entropy(net(x).flatten(0, 1), target.flatten()).backward()
        if world > 1:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()

    return step


program("lucidrains, ring", "lucidrains/ring-attention-pytorch", "cp=2")(lambda: ring(False, False))
program("lucidrains, causal ring", "lucidrains/ring-attention-pytorch", "cp=2")(lambda: ring(True, False))
program("lucidrains, causal striped ring", "lucidrains/ring-attention-pytorch", "cp=2")(lambda: ring(True, True))


@program("fairscale, experts", "facebookresearch/fairscale", "ep=2")
def _() -> Step:
    def step() -> None:
        checkout("facebookresearch/fairscale")
        from fairscale.nn.moe import moe_layer, top2gate

        top2gate.gumbel_rsample = lambda shape, device: torch.zeros(shape)  # noise that ranks draw for themselves
        with group_of_one():
            rank, world = who()
            gate = top2gate.Top2Gate(WIDTH, 2)
            experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
            head = nn.Linear(WIDTH, CLASSES)
            whole = nn.ModuleDict({"gate": gate, "experts": experts, "head": head})
            normal(whole)
            own = experts if world == 1 else nn.ModuleList([experts[rank]])
            for expert in own.parameters():
                expert.expert = True

            class Model(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.moe, self.head = moe_layer.MOELayer(gate, own), head

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.head(self.moe(x))  # type: ignore[no-any-return]

            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x, target = numbers(4, 2, WIDTH), torch.randint(0, CLASSES, (4, 2), generator=torch.Generator().manual_seed(2))
            x, target = x.chunk(world)[rank], target.chunk(world)[rank]
            F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
            if world > 1:
                for parameter in model.parameters():
                    if not hasattr(parameter, "expert"):
                        dist.all_reduce(parameter.grad)
                    parameter.grad /= world
            optimizer.step()

    return step
