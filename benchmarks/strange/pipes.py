"""Pipelines by `torch.distributed.pipelining`, with the schedules that it has, and stages as people make them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from common import RANK, WORLD, Case, Gpt, main, tokens
from torch import nn


class Staged(Gpt):
    """May lack its ends, and layers, as a stage does."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=4, tied=tied)
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(self.layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stage_of(whole: nn.Module, number: int, count: int, word: str) -> nn.Module:
    """A copy of the whole without what is not its own."""
    stage = copy.deepcopy(whole)
    per = 4 // count
    keep = list(range(number * per, (number + 1) * per))
    if word == "layer_left_out" and number == 1:
        keep = keep[1:]
    if word == "layers_swapped" and number == 0:
        keep = keep[::-1]
    stage.layers = nn.ModuleDict({str(i): stage.layers[str(i)] for i in keep})
    if number:
        stage.embed = stage.place = None
    if number < count - 1:
        stage.norm = stage.head = None
    return stage


def scheduled(word: str, kind: str) -> None:
    whole = Staged()
    loss_of = Loss()
    if WORLD == 1:
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
        for row in tokens(2):
            optimizer.zero_grad()
            loss_of(whole(row[:, :-1]), row[:, 1:]).backward()
            optimizer.step()
        return
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
    )

    several = kind in ("interleaved", "looped")
    count = 2 * WORLD if several else WORLD
    mine = range(RANK, count, WORLD)
    parts = [stage_of(whole, i, count, word) for i in mine]
    stages = [PipelineStage(part, i, count, torch.device("cpu")) for part, i in zip(parts, mine, strict=True)]
    make = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "looped": ScheduleLoopedBFS}[kind]
    schedule = make(stages if several else stages[0], n_microbatches=4, loss_fn=loss_of, scale_grads=word != "not_scaled")
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    for row in tokens(2):
        if word != "not_cleared":
            optimizer.zero_grad()
        if word == "not_cleared" and RANK == 0:
            for p in parts[0].parameters():
                p.grad = torch.full_like(p, 1e-2) if p.grad is None else p.grad
        inputs = (row[:, :-1],) if RANK == 0 else ()
        labels = row[:, 1:].roll(1, 0) if word == "labels_of_others" else row[:, 1:]
        schedule.step(*inputs, **({"target": labels} if count - 1 in mine else {}))
        if word == "one_stage_clipped" and RANK == 0:
            nn.utils.clip_grad_norm_(parts[0].parameters(), 0.05)
        optimizer.step()


def gpipe(word: str) -> None:
    scheduled(word, "gpipe")


def one_forward_one_backward(word: str) -> None:
    scheduled(word, "1f1b")


def interleaved(word: str) -> None:
    scheduled(word, "interleaved")


def looped(word: str) -> None:
    scheduled(word, "looped")


class Numbered(nn.Module):
    """A stage that counts its layers from nought."""

    def __init__(self, layers: list[nn.Module], front: nn.Module | None, back: nn.Module | None) -> None:
        super().__init__()
        self.front, self.blocks, self.back = front, nn.Sequential(*layers), back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x) if self.front is not None else x
        x = self.blocks(x)
        return self.back(x) if self.back is not None else x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.blocks = nn.Sequential(*Gpt(layers=4).layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.blocks(self.front(x)))


def by_hand(word: str, tied: bool = False) -> None:
    """Send and receive, microbatch after microbatch."""
    whole = Whole()
    if tied:
        whole.back.weight = nn.Parameter(whole.front.weight.detach().clone()) if WORLD > 1 else whole.front.weight
    if WORLD > 1:
        layers = list(whole.blocks)[RANK * 2 : RANK * 2 + 2]
        stage = Numbered(layers, whole.front if RANK == 0 else None, whole.back if RANK == WORLD - 1 else None)
    else:
        stage = whole
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for row in tokens(1):
        held = []
        for part in row.chunk(2 if WORLD > 1 else 1):
            x, y = part[:, :-1], part[:, 1:]
            if RANK:
                x = torch.empty(*x.shape, 16)
                dist.recv(x, RANK - 1)
                x.requires_grad_()
            out = stage(x)
            held.append((x, y, out))
            if RANK < WORLD - 1:
                dist.send(out.detach(), RANK + 1)
        for i, (x, y, out) in enumerate(held):
            if RANK == WORLD - 1:
                scale = 1 if word == "not_divided" else len(held)
                (nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()) / scale).backward()
            else:
                g = torch.empty_like(out)
                dist.recv(g, RANK + 1)
                if word == "second_gradient_lost" and i == 1:
                    g = torch.zeros_like(g)
                out.backward(g)
            if RANK:
                dist.send(x.grad, RANK - 1)
        if tied and WORLD > 1 and word != "ends_not_summed":
            end = stage.front.weight if RANK == 0 else stage.back.weight
            dist.all_reduce(end.grad)
            if word == "ends_averaged":
                end.grad /= 2
        optimizer.step()


def tied_ends(word: str) -> None:
    by_hand(word, tied=True)


CASES = {
    "gpipe": Case(gpipe, ("",), {"not_scaled": "(gradient|backward):", "layer_left_out": r"(model|forward):layers\.2(\..*)?", "layers_swapped": r"forward:(layers\.[01])?", "labels_of_others": "forward:(Loss|)", "one_stage_clipped": r"gradient:(embed|place|layers\.[01]\..*)"}),
    "1f1b": Case(one_forward_one_backward, ("",), {"not_cleared": r"gradient:(embed|place|layers\.[01]\..*)", "not_scaled": "(gradient|backward):"}),
    "interleaved": Case(interleaved, ("",), {"not_scaled": "(gradient|backward):", "labels_of_others": "forward:(Loss|)"}),
    "looped": Case(looped, ("",), {"not_scaled": "(gradient|backward):"}),
    "by_hand": Case(by_hand, ("",), {"not_divided": "(gradient|backward):", "second_gradient_lost": r"backward:(blocks(\.[12])?)?"}),
    "tied_ends": Case(tied_ends, ("",), {"ends_not_summed": "gradient:(front|back)", "ends_averaged": "gradient:(front|back)"}),
}
if __name__ == "__main__":
    main(CASES)
