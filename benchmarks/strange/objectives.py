"""Losses that look at more than a row, several models, several passes: where data parallelism is easily got wrong."""

# More than 400 lines: a list of programs, one function each.
from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Gpt, Mlp, average, batches, main, mine, next_token, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, without a gradient."""
    value = value.detach().clone()
    if WORLD > 1:
        dist.all_reduce(value)
    return value


class Gather(torch.autograd.Function):
    """All ranks' rows; the gradient of a rank's own is the sum over ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(WORLD)[RANK]


def padded(word: str) -> None:
    """Rows of unequal length: the mean is over tokens, whichever microbatch and rank they are in."""
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = 2 if WORLD > 1 and word != "at_once" else 1
    for row in tokens(2):
        labels = row[:, 1:].clone()
        for i in range(len(labels)):
            labels[i, 3 + i :] = -100
        optimizer.zero_grad()
        labels = mine(labels)
        count = (labels != -100).sum()
        count = count if word == "count_of_own_rows" else total(count)
        for a, b in zip(mine(row).chunk(parts), labels.chunk(parts), strict=True):
            logits = model(a[:, :-1]).flatten(0, 1)
            if word == "mean_of_means":
                loss = nn.functional.cross_entropy(logits, b.flatten()) / parts
            elif word == "padding_counted":
                loss = nn.functional.cross_entropy(logits, b.flatten(), reduction="sum") / (b.numel() * parts)
            else:
                loss = nn.functional.cross_entropy(logits, b.flatten(), reduction="sum") / count * WORLD
            loss.backward()
        average(model)
        optimizer.step()


def contrastive(word: str) -> None:
    """Every row against all rows of all ranks."""
    image, text = Mlp(), Mlp()
    both = nn.ModuleList([image, text])
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3)
    for x, _ in batches(2):
        optimizer.zero_grad()
        a, b = (nn.functional.normalize(m(mine(v)), dim=-1) for m, v in ((image, x), (text, x.flip(-1))))
        every_a, every_b = a, b
        if WORLD > 1 and word != "own_rows_only":
            if word == "gathered_without_gradient":
                every_a, every_b = (Gather.apply(v.detach()) for v in (a, b))
            else:
                every_a, every_b = Gather.apply(a), Gather.apply(b)
        labels = torch.arange(len(a)) + (0 if word in ("labels_not_shifted", "own_rows_only") else RANK * len(a))
        loss = (nn.functional.cross_entropy(a @ every_b.T * 5, labels) + nn.functional.cross_entropy(b @ every_a.T * 5, labels)) / 2
        loss.backward()
        average(both)
        optimizer.step()


def adversarial(word: str) -> None:
    """A generator and a discriminator, each with an optimizer."""
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    one, two = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9)), torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    say = nn.functional.binary_cross_entropy_with_logits
    for x, z in batches(2):
        x, z = mine(x), mine(z)
        fake = maker(z)
        two.zero_grad()
        real_said, fake_said = judge(x), judge(fake.detach())
        (say(real_said, torch.ones_like(real_said)) + say(fake_said, torch.ones_like(fake_said) if word == "labels" else torch.zeros_like(fake_said))).backward()
        if word != "judge_not_averaged":
            average(judge)
        two.step()
        one.zero_grad()
        said = judge(fake)
        say(said, torch.ones_like(said)).backward()
        if word != "maker_not_averaged":
            average(maker)
        one.step()


def tied(word: str) -> None:
    """An embedding that is the head as well."""
    model = Gpt(tied=True)
    if word == "untied":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(2):
        optimizer.zero_grad()
        next_token(wrapped(mine(row)[:, :-1]), mine(row)).backward()
        if word == "counted_twice":
            model.embed.weight.grad *= 2
        optimizer.step()


class Recurrent(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.first, self.rnn, self.last, self.word = nn.Linear(8, 12), nn.LSTM(12, 12, num_layers=2, batch_first=True), nn.Linear(12, 4), word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.word == "reversed":
            h = h.flip(1)
        out, _ = self.rnn(h)
        return self.last(out[:, 0 if self.word == "first_not_last" else -1])


def recurrent(word: str) -> None:
    model = Recurrent(word)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for x, y in batches(2, width=40):
        optimizer.zero_grad()
        (wrapped(mine(x).unflatten(1, (5, 8))) - mine(y)).square().mean().backward()
        optimizer.step()


class Saving(Gpt):
    """Recomputes its layers."""

    word = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for i, layer in enumerate(self.layers):
            if self.word == "one_without_gradient" and i == 0:
                with torch.no_grad():
                    x = layer(x)
            elif self.word == "plain" or WORLD == 1:
                x = layer(x)
            elif self.word == "wrong_input":
                kept = x.detach().clone()
                x = checkpoint(lambda v, layer=layer, kept=kept: layer(v) if not torch._C._current_graph_task_id() + 1 else layer(v * 0 + kept.roll(1, 0)), x, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=self.word == "reentrant")
        return self.head(self.norm(x))


def saving(word: str) -> None:
    model = Saving()
    model.word = word
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row in tokens(1):
        next_token(model(mine(row)[:, :-1]), mine(row)).backward()
        average(model)
        optimizer.step()


def distilled(word: str) -> None:
    """A teacher that is not trained, and a temperature."""
    teacher, student = Mlp(), Mlp()
    teacher.requires_grad_(False)
    if word != "teacher_trains":
        teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for x, _ in batches(2):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = (teacher(mine(x)) / (1.0 if word == "other_temperature" else 2.0)).softmax(-1)
        said = (student(mine(x)) / 2.0).log_softmax(-1)
        scale = 1.0 if word == "not_squared" else 4.0
        reduction = "mean" if word == "mean_of_elements" else "batchmean"
        (nn.functional.kl_div(said, wanted, reduction=reduction) * scale).backward()
        average(student)
        optimizer.step()


def followed(word: str) -> None:
    """A target network that follows the online one (BYOL, DQN)."""
    online = Mlp()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-2)
    for x, _ in batches(3):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = target(mine(x).flip(-1))
        loss = (nn.functional.normalize(online(mine(x)), dim=-1) - nn.functional.normalize(wanted, dim=-1)).square().mean()
        loss.backward()
        average(online)
        optimizer.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters(), strict=True):
                if word == "never":
                    continue
                t.lerp_(o, 0.5 if word == "rate" else 0.1)


def unsynced(word: str) -> None:
    """Accumulation under DDP, with `no_sync`."""
    model = Gpt()
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = 2 if WORLD > 1 else 1
    for row in tokens(2):
        optimizer.zero_grad()
        chunks = mine(row).chunk(parts)
        for i, part in enumerate(chunks):
            hold = WORLD > 1 and word != "synced_always" and (i + 1 < parts or word == "never_synced")
            with wrapped.no_sync() if hold else contextlib.nullcontext():
                loss = next_token(wrapped(part[:, :-1]), part)
                (loss if word == "not_divided" else loss / parts).backward()
            if word == "stepped_each_time":
                optimizer.step()
        optimizer.step()


class Branches(nn.Module):
    """Two branches, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        h = self.first(x).relu()
        return self.last((self.b if way else self.a)(h).relu())


def branches(word: str) -> None:
    model = Branches()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(2)):
        optimizer.zero_grad()
        way = RANK if word == "way_by_rank" else step % 2
        (wrapped(mine(x), way) - mine(y)).square().mean().backward()
        optimizer.step()


def advantage(word: str) -> None:
    """A policy gradient whose advantages are normalised over all rows."""
    policy, value = Mlp(), Mlp()
    both = nn.ModuleDict({"policy": policy, "value": value})
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-3)
    for x, y in batches(2):
        optimizer.zero_grad()
        x, rewards, actions = mine(x), mine(y)[:, 0], mine(y).argmax(-1)
        guess = value(x)[:, 0]
        gain = rewards - guess.detach()
        n = len(gain) * WORLD
        if word == "normalised_by_rank":
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        else:
            middle = total(gain.sum()) / n
            gain = (gain - middle) / ((total((gain - middle).square().sum()) / (n - 1)).sqrt() + 1e-8)
        chosen = policy(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        ratio = (chosen - chosen.detach()).exp()
        surrogate = -(torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)).mean()
        (surrogate + (0.0 if word == "no_value_loss" else 0.5) * (guess - rewards).square().mean()).backward()
        average(both)
        optimizer.step()


def penalty(word: str) -> None:
    """A penalty on the gradient of the output for the input: backward twice."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, _ in batches(2):
        optimizer.zero_grad()
        x = mine(x).clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=word != "penalty_detached", retain_graph=True)
        dims = None if word == "norm_of_batch" else 1
        gone = (slope.norm() if dims is None else slope.norm(dim=dims)) - 1
        (out.mean() + 10 * gone.square().mean()).backward()
        average(model)
        optimizer.step()


def dice(word: str) -> None:
    """An overlap of all rows."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches(2):
        optimizer.zero_grad()
        p, t = model(mine(x)).sigmoid(), (mine(y) > 0).float()
        sums = torch.stack([(p * t).sum(), p.sum(), t.sum()])
        if WORLD > 1 and word != "overlap_by_rank":
            sums = sums + (total(sums) - sums.detach())
        loss = 1 - 2 * sums[0] / (sums[1] + sums[2])
        (loss * (1 if word in ("overlap_by_rank", "averaged_anyway") else WORLD)).backward()
        average(model)
        optimizer.step()


class Deep(nn.Module):
    """A loss at each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + layer(x)
            out.append(head(x))
        return out


def supervised(word: str) -> None:
    model = Deep()
    wrapped = DistributedDataParallel(model, static_graph=True) if WORLD > 1 else model
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    for x, y in batches(2):
        optimizer.zero_grad()
        losses = [(out - mine(y)).square().mean() for out in wrapped(mine(x))]
        weights = (1.0, 0.3) if word == "weights_swapped" else (0.3, 1.0)
        (losses[1] if word == "last_only" else sum(w * v for w, v in zip(weights, losses, strict=True))).backward()
        optimizer.step()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.stem(x)).relu()
        return self.head((h + self.conv(h)).mean((2, 3)))


def convolved(word: str) -> None:
    model = Convolved()
    if word == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if word == "more_groups":
        model.norm = nn.GroupNorm(4, 8)
    if word == "other_padding":
        model.conv.padding_mode, model.conv._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for x, y in batches(2, width=36):
        optimizer.zero_grad()
        image = mine(x).unflatten(1, (1, 6, 6))
        (wrapped(image) - mine(y)).square().mean().backward()
        optimizer.step()


class Graph(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.inside, self.message, self.out, self.word = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4), word

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.inside(x).relu()
        source, target = edges if self.word != "edges_turned" else edges.flip(0)
        sums = torch.zeros_like(h).index_add(0, target, self.message(h)[source])
        degree = torch.zeros(len(h)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        return self.out(h + (sums if self.word == "not_by_degree" else sums / degree[:, None]))


def graphs(word: str) -> None:
    """Nodes that send messages; each row a graph of four."""
    model = Graph(word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(2, width=32):
        optimizer.zero_grad()
        nodes = mine(x).unflatten(1, (4, 8)).flatten(0, 1)
        one = torch.tensor([[0, 1, 2, 3, 0, 3], [1, 2, 3, 0, 2, 1]])
        edges = torch.cat([one + 4 * i for i in range(len(nodes) // 4)], 1)
        out = model(nodes, edges).unflatten(0, (-1, 4)).mean(1)
        (out - mine(y)).square().mean().backward()
        average(model)
        optimizer.step()


CASES = {
    "padded": Case(padded, ("", "at_once"), {"mean_of_means": "backward:|gradient:", "count_of_own_rows": "backward:|gradient:", "padding_counted": "backward:|gradient:"}),
    "contrastive": Case(contrastive, ("",), {"gathered_without_gradient": "backward:[01]?", "labels_not_shifted": "backward:[01]?", "own_rows_only": "backward:[01]?"}),
    "adversarial": Case(adversarial, ("",), {"labels": "backward:(Sequential|)", "judge_not_averaged": "gradient:(Sequential.*|)", "maker_not_averaged": "gradient:[02]?"}, steps=2),
    "tied": Case(tied, ("",), {"untied": "(gradient|model|update):(embed|head)", "counted_twice": "gradient:(embed|head)"}),
    "recurrent": Case(recurrent, ("",), {"reversed": "forward:(rnn|)", "first_not_last": "forward:(last|)"}),
    "saving": Case(saving, ("", "plain", "reentrant"), {"one_without_gradient": r"(backward|gradient):(layers\.0.*|)", "wrong_input": r"(forward|backward):(layers\.1(\.norm1)?|)"}),
    "distilled": Case(distilled, ("",), {"other_temperature": "backward:", "not_squared": "(backward|gradient):", "mean_of_elements": "(backward|gradient):"}),
    "followed": Case(followed, ("",), {"rate": r"update:Mlp(\..*)?", "never": r"update:Mlp(\..*)?"}, steps=3),
    "unsynced": Case(unsynced, ("", "synced_always"), {"never_synced": "gradient:", "not_divided": "(gradient|backward):", "stepped_each_time": "(forward|gradient|update):"}),
    "branches": Case(branches, ("",), {"way_by_rank": "forward:"}, steps=2),
    "advantage": Case(advantage, ("",), {"normalised_by_rank": "backward:(policy|)", "no_value_loss": "(backward|gradient):(value|)"}),
    "penalty": Case(penalty, ("",), {"penalty_detached": "backward:", "norm_of_batch": "backward:"}),
    "dice": Case(dice, ("",), {"overlap_by_rank": "(backward|gradient):", "averaged_anyway": "(backward|gradient):"}),
    "supervised": Case(supervised, ("",), {"weights_swapped": "backward:", "last_only": r"(backward|gradient):(heads\.0)?"}),
    "convolved": Case(convolved, ("", "channels_last"), {"more_groups": "forward:norm", "other_padding": "forward:conv"}),
    "graphs": Case(graphs, ("",), {"edges_turned": "forward:", "not_by_degree": "forward:"}),
}
if __name__ == "__main__":
    main(CASES)
