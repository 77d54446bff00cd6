"""Manners that the other programs have not: heads exchanged for rows, updates within the backward pass, functional models, reparametrised weights, flat shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Gpt, Mlp, average, batches, main, mine, next_token, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm


def everywhere(x: torch.Tensor, out: int, into: int, turned: bool = False) -> torch.Tensor:
    """Part `out` of a tensor goes to every rank, and what comes is put together along `into`."""
    send = [part.contiguous() for part in x.chunk(WORLD, out)]
    take = [torch.empty_like(send[0]) for _ in send]
    dist.all_to_all(take, send) if dist.get_backend() != "gloo" else _by_pairs(take, send)
    return torch.cat(take[::-1] if turned else take, into)


def _by_pairs(take: list[torch.Tensor], send: list[torch.Tensor]) -> None:
    whole = torch.empty(WORLD * WORLD, *send[0].shape)
    dist.all_gather(list(whole.view(WORLD, WORLD, *send[0].shape)), torch.stack(send))
    for i, t in enumerate(take):
        t.copy_(whole.view(WORLD, WORLD, *send[0].shape)[i, RANK])


class Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out, into, turned):
        ctx.way = out, into
        return everywhere(x, out, into, turned)

    @staticmethod
    def backward(ctx, g):
        out, into = ctx.way
        return everywhere(g, into, out), None, None, None


class Exchanged(nn.Module):
    """A part of the sequence outside, a part of the heads inside."""

    def __init__(self, whole: nn.Module, word: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.size, self.word = whole.q, whole.k, whole.v, whole.o, whole.size, word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (Everywhere.apply(p(x).unflatten(-1, (-1, self.size)).transpose(1, 2), 1, 2, False) for p in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(Everywhere.apply(out, 2, 1, self.word == "heads_turned").transpose(1, 2).flatten(2))


class Placed(Gpt):
    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.place(where)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def heads(word: str) -> None:
    model = Placed()
    if WORLD > 1:
        for layer in model.layers:
            layer.attention = Exchanged(layer.attention, word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        x, y = (part.chunk(WORLD, 1)[RANK] for part in (row[:, :-1], row[:, 1:]))
        where = torch.arange(x.shape[1]) + RANK * x.shape[1]
        nn.functional.cross_entropy(model(x, where).flatten(0, 1), y.flatten()).backward()
        average(model)
        optimizer.step()


def in_backward(word: str) -> None:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = Gpt()
    held = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def arrived(p: torch.Tensor) -> None:
        if WORLD > 1 and not (word == "head_not_averaged" and p is model.head.weight):
            dist.all_reduce(p.grad)
            p.grad /= WORLD
        held[p].step()
        held[p].zero_grad()

    for p in held:
        p.register_post_accumulate_grad_hook(arrived)
    for row in tokens(2):
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()


def functional(word: str) -> None:
    """The module is a function of a dictionary of parameters; the update makes another dictionary."""
    model = Mlp()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    for x, y in batches(3):
        values = {n: v.requires_grad_() for n, v in values.items()}
        loss = (torch.func.functional_call(model, values, (mine(x),)) - mine(y)).square().mean()
        gradients = torch.autograd.grad(loss, list(values.values()))
        if WORLD > 1 and word != "not_averaged":
            for g in gradients:
                dist.all_reduce(g)
                g /= WORLD
        values = {n: (v - 0.1 * g).detach() for (n, v), g in zip(values.items(), gradients, strict=True)}


def normalised(word: str) -> None:
    """Weights that are a direction and a length."""
    model = Mlp()
    model.first, model.last = weight_norm(model.first), weight_norm(model.last)
    if word == "length_frozen":
        model.first.parametrizations.weight.original0.requires_grad_(False)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for x, y in batches(2):
        optimizer.zero_grad()
        (wrapped(mine(x)) - mine(y)).square().mean().backward()
        optimizer.step()


def flat(word: str) -> None:
    """All parameters are views of one buffer, of which a rank updates its part."""
    model = Mlp()
    every = list(model.parameters())
    pad = -sum(p.numel() for p in every) % 2
    buffer = torch.cat([*(p.detach().flatten() for p in every), torch.zeros(pad)])
    at = 0
    for p in every:
        p.data = buffer[at : at + p.numel()].view_as(p)
        at += p.numel()
    own = nn.Parameter(buffer.chunk(WORLD)[RANK].clone())
    optimizer = torch.optim.AdamW([own], lr=1e-2)
    for x, y in batches(2):
        (model(mine(x)) - mine(y)).square().mean().backward()
        whole = torch.cat([*(p.grad.flatten() for p in every), torch.zeros(pad)])
        if WORLD > 1:
            part = torch.empty_like(own)
            dist.reduce_scatter_tensor(part, whole)
            whole = part / WORLD
        own.grad = whole
        optimizer.step()
        if WORLD > 1:
            parts = [torch.empty_like(own.data) for _ in range(WORLD)]
            dist.all_gather(parts, own.data)
            buffer.copy_(torch.cat(parts[::-1] if word == "gathered_in_turn" else parts))
        else:
            buffer.copy_(own.data)
        model.zero_grad()


CASES = {
    "heads": Case(heads, ("",), {"heads_turned": r"forward:layers\.0\.attention"}),
    "in_backward": Case(in_backward, ("",), {"head_not_averaged": "gradient:head"}),
    "functional": Case(functional, ("",), {"not_averaged": "(gradient|update):"}),
    "normalised": Case(normalised, ("",), {"length_frozen": r"(gradient|update|model):first\.parametrizations\.weight"}),
    "flat": Case(flat, ("",), {"gathered_in_turn": "update:"}),
}
if __name__ == "__main__":
    main(CASES)
