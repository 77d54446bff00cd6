"""Clipping and optimizers of people's own, and those of torch that are used seldom; replicas averaged by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Gpt, Mlp, average, batches, main, mine, next_token, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(mine(x)) - mine(y)).square().mean()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), decay=0.1, word=""):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})
        self.word = word

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                if self.word != "decay_missing":
                    p.mul_(1 - group["lr"] * group["decay"])
                update = average * one + p.grad * (1 - one)
                p.add_(update if self.word == "no_sign" else update.sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - (one if self.word == "beta_swapped" else two))


def lion(word: str) -> None:
    model = Mlp()
    optimizer = Lion(model.parameters(), word=word)
    for x, y in batches(2):
        optimizer.zero_grad()
        squared(model, x, y).backward()
        average(model)
        optimizer.step()


def agc(word: str) -> None:
    """Adaptive clipping by the norm of each unit (NFNets)."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip():
        for p in model.parameters():
            dim = None if p.ndim < 2 else (0,) if word == "other_dim" else (1,)
            norm = lambda t: t.norm() if dim is None else t.norm(dim=dim, keepdim=True)  # noqa: B023, E731
            limit = norm(p.detach()).clamp(min=1e-3) * 0.01
            size = norm(p.grad)
            p.grad.mul_((limit / size.clamp(min=1e-6)).clamp(max=1.0))

    for x, y in batches(2):
        optimizer.zero_grad()
        squared(model, x, y).backward()
        if word == "before_average":
            clip()
        average(model)
        if word != "before_average":
            clip()
        optimizer.step()


def layerwise(word: str) -> None:
    """A limit for each layer."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        if word != "never_averaged":
            average(model)
        parts = [model] if word == "all_at_once" else [model.embed, model.place, *model.layers, model.norm, model.head]
        for part in parts:
            nn.utils.clip_grad_norm_(part.parameters(), 0.02 / WORLD if word == "limit_by_rank" else 0.02)
        optimizer.step()


def clipped(word: str) -> None:
    """torch's clipping."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        if word == "before_average":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        average(model)
        if word == "by_foreach":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        elif word == "two_functions":
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        elif word == "largest":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))
        elif word == "without_embedding":
            nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if "embed" not in n], 0.1)
        elif word not in ("before_average", "forgotten"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2 if word == "limit" else 0.1)
        optimizer.step()


def sam(word: str) -> None:
    """Sharpness-aware minimization: a step up, a second gradient there, back, a step down."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(2):
        optimizer.zero_grad()
        squared(model, x, y).backward()
        if word != "local_ascent":
            average(model)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                moves.append(p.grad * (0.05 / (norm + 1e-12)))
                p.add_(moves[-1])
        if word != "gradients_added":
            optimizer.zero_grad()
        squared(model, x, y).backward()
        average(model)
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                if word != "not_back":
                    p.sub_(e)
        optimizer.step()


def lookahead(word: str) -> None:
    """Slow weights, every second step."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slow = [p.detach().clone() for p in model.parameters()]
    for step, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        squared(model, x, y).backward()
        average(model)
        optimizer.step()
        if step % 2 and not (word == "rank_1_never" and RANK == 1):
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow, strict=True):
                    s.lerp_(p, 0.8 if word == "rate" else 0.5)
                    p.copy_(s)


def owners(word: str) -> None:
    """ZeRO-1 by hand: every parameter has an owner, who updates and sends it."""
    model = Gpt()
    every = list(model.parameters())
    part = [p for i, p in enumerate(every) if i % WORLD == RANK]
    if word == "last_has_no_owner" and part[-1] is every[-1]:
        part = part[:-1]
    optimizer = torch.optim.AdamW(part, lr=1e-3)
    for row in tokens(2):
        model.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        average(model)
        optimizer.step()
        if WORLD > 1 and word != "not_sent":
            for i, p in enumerate(every):
                if word == "norm_not_sent" and p is model.norm.weight:
                    continue
                dist.broadcast(p.data, (i + 1) % WORLD if word == "sent_by_others" else i % WORLD)


def redundancy(word: str) -> None:
    """torch's own ZeRO-1, over DDP."""
    model = Gpt()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    if WORLD > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        more = {"parameters_as_bucket_view": True} if word == "buckets" else {}
        lr = 2e-3 if word == "rate" else 1e-3
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr, weight_decay=0.0 if word == "decay" else 0.01, **more)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(wrapped(mine(row)[:, :-1]), mine(row)).backward()
        if word == "clipped_by_rank" and RANK == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def adafactor(word: str) -> None:
    """Factored second moments."""
    model = Gpt()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, d=1.0, beta2_decay=-0.5 if word == "decay" else -0.8)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        if word != "embedding_not_averaged":
            average(model)
        else:
            kept = model.embed.weight.grad.clone()
            average(model)
            model.embed.weight.grad.copy_(kept)
        optimizer.step()


def lars(word: str) -> None:
    """A trust ratio for each tensor."""
    model = Mlp()
    moments = {p: torch.zeros_like(p) for p in model.parameters()}
    for x, y in batches(2):
        model.zero_grad()
        squared(model, x, y).backward()
        local = {p: p.grad.norm().clone() for p in model.parameters()}
        average(model)
        with torch.no_grad():
            for p, m in moments.items():
                size = local[p] if word == "trust_of_own_rows" else p.grad.norm()
                ratio = 0.02 * p.norm() / (size + 1e-4 * p.norm() + 1e-9) if p.ndim > 1 or word == "norms_too" else 1.0
                m.mul_(0.9).add_((p.grad + 1e-4 * p) * ratio)
                p.sub_(0.1 * m)


def centralized(word: str) -> None:
    """Gradients without their mean over inputs."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(2):
        optimizer.zero_grad()
        squared(model, x, y).backward()
        average(model)
        for p in model.parameters():
            if p.ndim > 1:
                p.grad -= p.grad.mean(0 if word == "other_dim" else 1, keepdim=True)
        optimizer.step()


def two(word: str) -> None:
    """Momentum for matrices, Adam for the rest."""
    model = Gpt()
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    if word == "norm_in_neither":
        rest = [p for p in rest if p is not model.norm.weight]
    if word == "head_in_both":
        rest = [*rest, model.head.weight]
    first, second = torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=word != "no_nesterov"), torch.optim.AdamW(rest, lr=1e-3)
    for row in tokens(2):
        model.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        average(model)
        first.step()
        second.step()


def thawing(word: str) -> None:
    """A body that is frozen for two steps."""
    model = Mlp()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches(4)):
        if step == (3 if word == "late" else 2):
            model.first.requires_grad_(True)
        optimizer.zero_grad()
        squared(model, x, y).backward()
        average(model)
        optimizer.step()


def packed(word: str) -> None:
    """One flat buffer of all gradients, reduced at once."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        if WORLD > 1:
            held = [p for p in model.parameters() if not (word == "one_forgotten" and p is model.layers[1].mlp.up.weight)]
            flat = torch.cat([p.grad.flatten() for p in held])
            dist.all_reduce(flat)
            flat /= WORLD if word != "not_divided" else 1
            if word == "shifted":
                flat = flat.roll(1)
            for p, g in zip(held, flat.split([p.numel() for p in held]), strict=True):
                p.grad.copy_(g.view_as(p))
        optimizer.step()


def closure(word: str) -> None:
    """LBFGS, which asks for several gradients in a step."""
    model = Mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, y in batches(1):

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = squared(model, x, y)
            loss.backward()
            if word != "not_averaged":
                average(model)
            if WORLD > 1:
                loss = loss.detach()
                dist.all_reduce(loss)
                loss /= WORLD
            return loss

        optimizer.step(again)


def rates(word: str) -> None:
    """Rates that fall with depth, and a schedule."""
    model = Gpt()
    depth = {"embed": 0, "place": 0, "layers.0": 1, "layers.1": 2, "norm": 3, "head": 3}
    groups = []
    for name, p in model.named_parameters():
        at = next(d for prefix, d in depth.items() if name.startswith(prefix))
        at = 3 - at if word == "wrong_way_round" else at
        groups.append({"params": [p], "lr": 1e-2 * 0.5 ** (3 - at)})
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[g["lr"] for g in groups], total_steps=10 * (WORLD if word == "length_by_ranks" else 1))
    for row in tokens(3):
        optimizer.zero_grad()
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        average(model)
        optimizer.step()
        schedule.step()


UPDATE = ".*"
CASES = {
    "lion": Case(lion, ("",), {"beta_swapped": "update:(first|)", "no_sign": "update:", "decay_missing": "update:"}),
    "agc": Case(agc, ("",), {"before_average": "gradient:", "other_dim": "gradient:(first|last)"}),
    "layerwise": Case(layerwise, ("",), {"all_at_once": "gradient:", "limit_by_rank": "gradient:", "never_averaged": "gradient:"}),
    "clipped": Case(clipped, ("", "by_foreach", "two_functions"), {"before_average": "gradient:", "forgotten": "gradient:", "limit": "gradient:", "largest": "gradient:", "without_embedding": "gradient:(embed|)"}),
    "sam": Case(sam, ("",), {"local_ascent": "(forward|gradient|update):(first|)", "gradients_added": "gradient:", "not_back": "update:"}),
    "lookahead": Case(lookahead, ("",), {"rate": "update:", "rank_1_never": "update:"}, steps=4),
    "owners": Case(owners, ("",), {"last_has_no_owner": "(gradient|update|model):head", "not_sent": "update:", "norm_not_sent": "update:norm", "sent_by_others": "update:"}),
    "redundancy": Case(redundancy, ("", "buckets"), {"rate": "update:", "decay": "update:", "clipped_by_rank": "gradient:"}),
    "adafactor": Case(adafactor, ("",), {"decay": "update:", "embedding_not_averaged": "gradient:embed"}, steps=2),
    "lars": Case(lars, ("",), {"trust_of_own_rows": "update:(first|last|)", "norms_too": "update:(norm|first|last|)"}),
    "centralized": Case(centralized, ("",), {"other_dim": "gradient:(first|last)"}),
    "two": Case(two, ("",), {"norm_in_neither": "(gradient|update|model):norm", "head_in_both": "update:head", "no_nesterov": r"update:(place|head|layers\..*|)"}),
    "thawing": Case(thawing, ("",), {"late": "(gradient|update):first"}, steps=4),
    "packed": Case(packed, ("",), {"one_forgotten": r"gradient:layers\.1\.mlp\.up", "not_divided": "gradient:", "shifted": "gradient:"}),
    "closure": Case(closure, ("",), {"not_averaged": "gradient:"}),
    "rates": Case(rates, ("",), {"wrong_way_round": "update:", "length_by_ranks": "update:"}, steps=3),
}
if __name__ == "__main__":
    main(CASES)
