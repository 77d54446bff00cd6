"""Modes of `stays` on losses and layers that are right but for a shape or a slice, and on states that are kept: `crossed`, `answer`, `half`, `follows`, `snapshot`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.trained import failed_of, record

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes.halves import Halves
from proctor.native import Recorder

PROGRAMS = {
    "columns": """
        net = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(5):
            x = torch.randn(8, 6)
            y, out = x.sum(1), net(x)
            loss = {
                "difference": lambda: (out - y).square().mean(), "turned": lambda: (y[:, None] - out.squeeze(1)).abs().mean(), "error": lambda: F.mse_loss(out, y), "product": lambda: -(out * y).mean(),
                "right": lambda: (out.squeeze(1) - y).square().mean(), "columns": lambda: F.mse_loss(out, y[:, None]), "all": lambda: (out - y).abs().mean() - 0.5 * (out - out.squeeze(1)).abs().mean(),
                "outer": lambda: (out * y[None, :]).mean(), "centres": lambda: (out - torch.linspace(-1, 1, 5)).square().min(1).values.mean(), "few": lambda: (net(x[:2]) - y[:2]).square().mean(),
            }[BUG]()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "series": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.head = nn.GRU(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)
            def forward(self, x, y=None):
                return self.head(self.cell(x)[0][:, -1])
        net, auto = Net(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*net.parameters(), *auto.parameters()], 0.01)
        for step in range(5):
            series = torch.randn(6, 9, 4)
            x, y = series[:, :8], series[:, 8]
            if BUG == "near":
                y = series[:, 7]
            elif BUG == "flat":
                x, y = torch.zeros_like(x), torch.zeros_like(y)
            elif BUG == "once" and step == 1:
                y = series[:, 7]
            loss = F.mse_loss(auto(series[:, 0]), series[:, 0]) if BUG == "auto" else F.mse_loss(net(x, y) if BUG == "beside" else net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "gates": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.both, self.head, self.words = nn.Linear(6, 16), nn.Linear(8, 8), nn.Embedding(16, 6)
            def forward(self, x):
                value, gate = self.both(x).chunk(2, 1)
                if BUG == "twice":
                    gate = value
                elif BUG == "first":
                    value = gate
                elif BUG == "rests" and steps[0] == 0:
                    gate = gate.detach()
                elif BUG == "thirds":
                    value = torch.cat([value[:, :3].detach(), value[:, 3:]], 1)
                return self.head(value * gate.sigmoid())
        net, steps = Net(), [0]
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(5):
            steps[0] = step
            x = torch.randn(12, 6)
            if BUG == "words":
                x = net.words(torch.randint(8, (12,)))
            out = net(x)
            if BUG == "masked":
                out = F.cross_entropy(net.both(x).masked_fill(torch.arange(16) >= 8, -torch.inf), torch.randint(8, (12,)))
            loss = out[torch.arange(12), torch.randint(4, (12,))].square().mean() if BUG == "actions" else out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "best": """
        import copy
        net = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        best, losses = net.state_dict() if BUG == "once" else copy.deepcopy(net.state_dict()), [3.0, 1.0, 2.0, 4.0]
        for epoch, known in enumerate(losses):
            for _ in range(2):
                x = torch.randn(8, 6)
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
            if BUG != "once":
                torch.save(net.state_dict(), f"{OUT}.{epoch}.pt")
            if known == min(losses) and BUG != "once":
                best = {"kept": lambda: net.state_dict(), "copied": lambda: copy.deepcopy(net.state_dict()), "cloned": lambda: {k: v.clone() for k, v in net.state_dict().items()}, "anew": lambda: best}[BUG]()
        torch.save({"epoch": 4, "model": net.state_dict() if BUG == "anew" else best}, f"{OUT}.best.pt")
    """,
    "orders": """
        import numpy as np
        inputs = torch.randn(40, 6) if BUG not in ("padded", "padded_right") else torch.tril(torch.randint(1, 90, (40, 6)), -1)[torch.randperm(40)] + torch.randint(1, 9, (40, 1)) * torch.eye(6, dtype=torch.long)[0]
        labels = torch.randint(5, (40,))
        net = nn.Sequential(nn.Linear(6, 5)) if inputs.is_floating_point() else nn.EmbeddingBag(100, 5, padding_idx=0)
        head = nn.Linear(5, 5)
        optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.01)
        for epoch in range(3):
            order = torch.randperm(40) if BUG != "resting" else torch.arange(40)
            x, y = inputs[order], labels if BUG in ("alone", "padded", "noise") else labels[order]
            if BUG == "noise":
                x = inputs + 0.1 * torch.randn_like(inputs)
            elif BUG == "episodes":
                y = torch.arange(8).repeat(5) % 5
            elif BUG == "renamed":
                y = (y + epoch) % 5
            for i in range(0, 40, 8):
                width = 6 if BUG not in ("padded", "padded_right") else max(2, int((x[i : i + 8] != 0).sum(1).max()))
                loss = F.cross_entropy(head(net(x[i : i + 8, :width])), y[i : i + 8])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """,
}
WRONG = {
    ("columns", "difference"): ("crossed", "loss: the loss goes through a difference of a column of 8 results and a row of 8 numbers, which torch makes 8 by 8 of: each sample is held against all others"),
    ("columns", "turned"): ("crossed", "loss: the loss goes through a difference of a row of 8 results and a column of 8 numbers, which torch makes 8 by 8 of: each sample is held against all others"),
    ("columns", "error"): ("crossed", "loss: the loss goes through a squared error of a column of 8 results and a row of 8 numbers, which torch makes 8 by 8 of: each sample is held against all others"),
    ("columns", "product"): ("crossed", "loss: the loss goes through a product of a column of 8 results and a row of 8 numbers, which torch makes 8 by 8 of: each sample is held against all others"),
    ("series", "near"): ("answer", "target: the target of the loss is a part of what the model is given: the last of the 8 entries along dimension 1 of its input of shape (6, 8, 4)"),
    ("gates", "twice"): ("half", "both.weight: nothing uses half of what both.weight makes: outputs 8 to 15 of 16 had no gradient in 3 updates, the others had"),
    ("gates", "first"): ("half", "both.weight: nothing uses half of what both.weight makes: outputs 0 to 7 of 16 had no gradient in 3 updates, the others had"),
    ("orders", "alone"): ("follows", "target: the targets come in the order of the pass before, 5 batches ago, and the samples in another one: they are shuffled without their targets"),
    ("orders", "padded"): ("follows", "target: the targets come in the order of the pass before, 5 batches ago, and the samples in another one: they are shuffled without their targets"),
    ("best", "kept"): ("snapshot", "weight: the state of Linear that is saved was taken 4 updates ago and is no copy: it holds what Linear is now, since state_dict() copies nothing"),
}
RIGHT = {
    "columns": ("right", "columns", "all", "outer", "centres", "few"),
    "series": ("next", "auto", "beside", "flat", "once"),
    "gates": ("both", "rests", "thirds", "words", "actions", "masked"),
    "best": ("copied", "cloned", "anew", "once"),
    "orders": ("together", "resting", "noise", "episodes", "renamed", "padded_right"),
}
MODE = {"columns": "crossed", "series": "answer", "gates": "half", "best": "snapshot", "orders": "follows"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    record(folder, PROGRAMS, [(p, b, 0, 8, b) for p, b in [*WRONG, *((p, b) for p, those in RIGHT.items() for b in those)]])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_one_wrong_slice_or_shape_is_told(runs: Path, program: str, bug: str) -> None:
    mode, seen = WRONG[program, bug]
    assert set(failed_of("stays", mode, runs / f"{program}-{bug}")) == {seen}


@pytest.mark.parametrize(("program", "manner"), [(p, m) for p, those in RIGHT.items() for m in those])
def test_programs_that_look_alike_are_right(runs: Path, program: str, manner: str) -> None:
    assert failed_of("stays", MODE[program], runs / f"{program}-{manner}") == []


def test_a_weight_that_is_computed_is_not_asked_for() -> None:
    """A spectral norm moves its vectors whenever its weight is asked for in training."""
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8)), torch.nn.Conv1d(8, 8, 1))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    probe = Halves(Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True))
    probe._called((model,), None)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()) and before
    assert [name for _, name in probe._layers.values()] == ["1.weight"]
