"""Habits of other fields: images cut in space, tables of embeddings, rings, averaged parameters, resumed programs."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist
from common import (
    RANK,
    WORLD,
    Both,
    Case,
    Copy,
    Gpt,
    Mlp,
    Sum,
    average,
    batches,
    main,
    mine,
    next_token,
    tokens,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Join(torch.autograd.Function):
    """Parts of all ranks, put together along a dimension; back: this rank's part of the sum."""

    @staticmethod
    def forward(ctx, x, dim, turned):
        ctx.dim = dim
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::-1] if turned else parts, dim)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(WORLD, ctx.dim)[RANK].contiguous(), None, None


def hooked(word: str) -> None:
    """DDP with a hook of the program's own in the place of its reduction."""
    model = Gpt()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model

    def reduce(state, bucket):  # DDP compares annotations with types, and here they are text
        values = bucket.buffer() if word == "summed" else bucket.buffer().div_(WORLD)
        return dist.all_reduce(values, async_op=True).get_future().then(lambda f: f.value()[0])

    if WORLD > 1:
        wrapped.register_comm_hook(None, reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(wrapped(mine(row)[:, :-1]), mine(row)).backward()
        optimizer.step()


def chunked(word: str) -> None:
    """The head and the loss by chunks of positions, each computed again in the backward pass."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(h).flatten(0, 1), y.flatten(), reduction="sum")

    for row in tokens(2):
        optimizer.zero_grad()
        x, y = mine(row)[:, :-1], mine(row)[:, 1:]
        h = model.embed(x) + model.place(torch.arange(x.shape[1]))
        for layer in model.layers:
            h = layer(h)
        h = model.norm(h)
        pieces = list(zip(h.split(3, 1), y.split(3, 1), strict=True))
        if WORLD > 1 and word == "last_dropped":
            pieces = pieces[:-1]
        sum(checkpoint(part, *p, use_reentrant=False) for p in pieces).div(y.numel()).backward()
        average(model)
        optimizer.step()


class Squares(nn.Module):
    """A norm over features that are cut over the ranks."""

    def __init__(self, width: int, word: str) -> None:
        super().__init__()
        self.weight, self.width, self.word = nn.Parameter(torch.linspace(0.5, 1.5, width)), width, word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.square().sum(-1, keepdim=True)
        if x.shape[-1] == self.width or self.word == "own_statistics":
            return x * (total / x.shape[-1] + 1e-6).rsqrt() * self.weight
        return x * (Both.apply(total) / self.width + 1e-6).rsqrt() * self.weight


class Gated(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), Squares(16, word), nn.Linear(16, 4, bias=False)
        if WORLD > 1:
            for p, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.norm.weight, 0), (self.down.weight, 1)):
                p.data = p.data.chunk(WORLD, dim)[RANK].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.gelu(self.up(Copy.apply(x) if WORLD > 1 else x)))
        out = self.down(h)
        return Sum.apply(out) if WORLD > 1 else out


def norm_cut(word: str) -> None:
    model = Gated(word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(2):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


class Click(nn.Module):
    """Two tables, of which a rank has one, and a net on what they say."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 6, mode="sum") for _ in range(2))
        self.net, self.word = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1)), word
        if WORLD > 1:
            self.tables[1 - RANK] = nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if WORLD == 1:
            return self.net(torch.cat([t(i) for t, i in zip(self.tables, ids, strict=True)], -1))
        own = self.tables[RANK](ids[RANK])
        return self.net(Join.apply(own, -1, self.word == "turned").chunk(WORLD)[RANK])


def tables(word: str) -> None:
    model = Click(word)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        ids = torch.randint(0, 20, (2, 8, 3), generator=generator)
        y = torch.rand(8, 1, generator=generator)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(ids), mine(y)).backward()
        if WORLD > 1:
            for p in model.net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= WORLD
            if word != "tables_summed":
                model.tables[RANK].weight.grad /= WORLD
        optimizer.step()


class Halo(torch.autograd.Function):
    """Rows of the neighbours on both sides of an image that is cut; back: they return to whom they are of."""

    @staticmethod
    def forward(ctx, x):
        edges = [torch.empty_like(x[..., :2, :]) for _ in range(WORLD)]
        dist.all_gather(edges, torch.cat([x[..., :1, :], x[..., -1:, :]], -2))
        none = torch.zeros_like(x[..., :1, :])
        above = edges[RANK - 1][..., 1:, :] if RANK else none
        below = edges[RANK + 1][..., :1, :] if RANK + 1 < WORLD else none
        return torch.cat([above, x, below], -2)

    @staticmethod
    def backward(ctx, g):
        edges = [torch.empty_like(g[..., :2, :]) for _ in range(WORLD)]
        dist.all_gather(edges, torch.cat([g[..., :1, :], g[..., -1:, :]], -2))
        own = g[..., 1:-1, :].clone()
        if RANK:
            own[..., :1, :] += edges[RANK - 1][..., 1:, :]
        if RANK + 1 < WORLD:
            own[..., -1:, :] += edges[RANK + 1][..., :1, :]
        return own


class Image(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.one, self.two, self.word = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.one, self.two):
            if WORLD > 1 and not (self.word == "no_halo" and conv is self.two):
                x = F.conv2d(Halo.apply(x), conv.weight, conv.bias, padding=(0, 1)).tanh()
            else:
                x = conv(x).tanh()
        return x


def halo(word: str) -> None:
    model = Image(word)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.randn(2, 3, 8, 6, generator=generator)
        optimizer.zero_grad()
        model(x.chunk(WORLD, 2)[RANK]).square().mean().backward()
        average(model)
        optimizer.step()


def uneven(word: str) -> None:
    """Rank 0 has five rows of eight, and gradients are weighted."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(2):
        optimizer.zero_grad()
        if WORLD > 1:
            x, y = (t.split([5, 3])[RANK] for t in (x, y))
        loss = (model(x) - y).square().mean()
        (loss if WORLD == 1 or word == "unweighted" else loss * len(x) * WORLD / 8).backward()
        average(model)
        optimizer.step()


def resumed(word: str) -> None:
    """After an update everything is saved, made anew and loaded."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches(3)):
        optimizer.zero_grad()
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()
        if step == 0 and WORLD > 1:
            kept = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
            kept.seek(0)
            saved = torch.load(kept)
            for p in model.parameters():
                p.data.zero_()
            model.load_state_dict(saved["model"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if word != "state_lost":
                optimizer.load_state_dict(saved["optimizer"])


class Whitened(torch.optim.Optimizer):
    """A preconditioner for rows and one for columns, as Shampoo has them."""

    def __init__(self, params, lr: float, word: str) -> None:
        super().__init__(params, {"lr": lr})
        self.word = word

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.reshape(len(p), -1)
                state = self.state[p]
                if not state:
                    state["left"], state["right"] = torch.eye(len(g)) * 0.1, torch.eye(g.shape[1]) * 0.1
                state["left"] += g @ g.T
                state["right"] += g.T @ g
                power = -0.25 if WORLD == 1 or self.word != "half_power" else -0.5
                p.sub_((_power(state["left"], power) @ g @ _power(state["right"], power)).view_as(p), alpha=group["lr"])


def _power(m: torch.Tensor, power: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(m)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** power) @ vectors.T


def whitened(word: str) -> None:
    model = Mlp()
    optimizer = Whitened(model.parameters(), 0.01, word)
    for x, y in batches(2):
        optimizer.zero_grad()
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()


class Coder(nn.Module):
    """The decoder's weight is the encoder's, turned."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.encode, self.shift, self.word = nn.Linear(8, 5), nn.Parameter(torch.zeros(8)), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.encode.weight.T
        return torch.tanh(self.encode(x)) @ (weight.detach() if WORLD > 1 and self.word == "detached" else weight).T + self.shift


def turned(word: str) -> None:
    model = Coder(word)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for x, _ in batches(2):
        optimizer.zero_grad()
        (wrapped(mine(x)) - mine(x)).square().mean().backward()
        optimizer.step()


class Ring(nn.Module):
    """A layer whose input is cut by rows: pieces go round, and each is multiplied as it comes."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.first, self.last, self.word = nn.Linear(8, 16), nn.Linear(16, 4), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if WORLD == 1:
            return self.last(torch.relu(self.first(x)))
        whole = Join.apply(x, 0, False)
        pieces = [F.linear(piece, self.first.weight, self.first.bias) for piece in whole.chunk(WORLD)]
        if self.word == "piece_twice":
            pieces[1] = pieces[0]
        return self.last(torch.relu(torch.cat(pieces).chunk(WORLD)[RANK]))


def ring(word: str) -> None:
    model = Ring(word)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2):
        optimizer.zero_grad()
        (model(mine(x)) - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()


def decayed(word: str) -> None:
    """Weights decay, biases and norms do not."""
    model = Gpt()
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 and not (WORLD > 1 and word == "norm_decays" and n == "norm.weight")]
    held = {id(p) for p in plain}
    optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": [p for p in model.parameters() if id(p) not in held], "weight_decay": 0.1}], lr=1e-2)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(wrapped(mine(row)[:, :-1]), mine(row)).backward()
        optimizer.step()


def teacher_of_itself(word: str) -> None:
    """A copy follows slowly, and its outputs are the targets."""
    model = Mlp()
    follower = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(3):
        with torch.no_grad():
            target = follower(mine(x))
        optimizer.zero_grad()
        ((model(mine(x)) - target).square().mean() + (model(mine(x)) - mine(y)).square().mean()).backward()
        average(model)
        optimizer.step()
        with torch.no_grad():
            for slow, p in zip(follower.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 0.5 if WORLD > 1 and word == "too_fast" else 0.1)


def averaged(word: str) -> None:
    """Each rank updates by its own gradient, and parameters are averaged; for plain descent that is the same."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(2):
        optimizer.zero_grad()
        (model(mine(x)) - mine(y)).square().mean().backward()
        optimizer.step()
        for name, p in model.named_parameters():
            if WORLD > 1 and not (word == "bias_left_out" and name == "last.bias"):
                dist.all_reduce(p.data)
                p.data /= WORLD


CASES = {
    "hooked": Case(hooked, ("",), {"summed": "gradient:"}),
    "chunked": Case(chunked, ("",), {"last_dropped": "(forward|backward|gradient):(head|norm)?"}),
    "norm_cut": Case(norm_cut, ("",), {"own_statistics": "forward:norm"}),
    "tables": Case(tables, ("",), {"turned": "forward:(net)?", "tables_summed": r"gradient:tables\.[01]"}),
    "halo": Case(halo, ("",), {"no_halo": "forward:(two)?"}),
    "uneven": Case(uneven, ("",), {"unweighted": "(backward|gradient):(last)?"}),
    "resumed": Case(resumed, ("",), {"state_lost": "update:"}, steps=3),
    "whitened": Case(whitened, ("",), {"half_power": "update:"}),
    "turned": Case(turned, ("",), {"detached": "(backward|gradient):(encode)?"}),
    "ring": Case(ring, ("",), {"piece_twice": "forward:(last)?"}),
    "decayed": Case(decayed, ("",), {"norm_decays": "update:norm"}),
    "teacher_of_itself": Case(teacher_of_itself, ("",), {"too_fast": "(forward|update|model):.*"}, steps=3),
    "averaged": Case(averaged, ("",), {"bias_left_out": "(update|model|gradient):last"}),
}
if __name__ == "__main__":
    main(CASES)
