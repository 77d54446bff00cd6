"""The first value that is not finite is named with its operation, line, module and inputs; harmless infinities are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from proctor.cli.capsule.origin import received, say
from proctor.instrument.replay.origin import OriginMode
from proctor.instrument.replay.plan import Link, Origin


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fc, self.out = kind, nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        h = torch.softmax(mask, -1) @ h
        if self.kind == "log":
            h = torch.log(h - h.detach())
        if self.kind == "masked":
            h = torch.softmax(torch.full((4, 4), float("-inf")), -1) @ h
        if self.kind == "sqrt":
            h = torch.sqrt((h - h.detach()).abs())
        return self.out(h)


def step(kind: str, x: torch.Tensor | None = None) -> Origin:
    torch.manual_seed(0)
    model = Model(kind)
    names = {id(p): name for name, p in model.named_parameters()}
    mode = OriginMode(names, {id(m): name for name, m in model.named_modules()}, lambda file: file == __file__)
    if kind == "parameter":
        with torch.no_grad():
            model.fc.weight[0, 0] = float("nan")
    mode.begin([(id(p), p) for p in model.parameters()])
    loss = model(torch.randn(4, 4) if x is None else x).sum()
    loss.backward()
    return mode.end([("the loss", loss), *((f"gradient {name}", p.grad) for name, p in model.named_parameters())])


def line_with(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_all_is_finite_though_a_mask_is_not() -> None:
    assert step("") == Origin()


def test_a_logarithm_of_zero_is_named_with_what_it_was_given() -> None:
    found = step("log")
    first = found.chain[0]
    assert found.end == "the loss" and first.operation == "aten.log.default" and first.line == line_with("torch.log(h")
    assert first.inputs == ("float32[4, 4] from 0 to 0",) and "16 infinite" in first.gave and not first.backward and not found.outside


def test_a_row_that_is_masked_whole_begins_with_its_mask() -> None:
    operations = [link.operation for link in step("masked").chain]
    assert operations[0] == "aten.full.default" and "aten._softmax.default" in operations


def test_a_gradient_that_is_infinite_is_told_with_the_line_of_its_forward() -> None:
    found = step("sqrt")
    assert found.end.startswith("gradient") and found.chain[0].backward and found.chain[0].line == line_with("torch.sqrt((h")


@pytest.mark.parametrize(("kind", "outside"), [("parameter", "fc.weight"), ("input", "an input of the step")])
def test_what_came_into_the_step_is_told(kind: str, outside: str) -> None:
    assert step(kind, torch.full((4, 4), float("nan")) if kind == "input" else None).outside == outside


def test_who_got_it_from_others_is_told_last(capsys: Any) -> None:
    def link(operation: str) -> Link:
        return Link(3, operation, "train.py:7", "fc", False, ("float32[2] from 0 to 0",), "float32[2], 2 infinite")

    found = {0: Origin("the loss", (link("c10d.allreduce_.default"),)), 1: Origin("gradient fc.weight", (link("aten.log.default"),)), 2: Origin()}
    assert received(found[0]) and not received(found[1])
    say(found)
    out = capsys.readouterr().out
    assert out.index("rank 1: gradient fc.weight") < out.index("rank 0: the loss is not finite (it came by a collective") and "rank 2" not in out
