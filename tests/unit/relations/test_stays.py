"""Modes, numbers, statistics, moments and digits that stay, and sequences that say what they are to say: modes of `stays` that one wrong line breaks and right manners keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.trained import failed_of, record, trace_of

pytest.importorskip("torch")

from proctor.instrument.probes.sequences import ahead, padded
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry, stays

PROGRAMS = {
    "rested": """
        import copy
        net = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        average = copy.deepcopy(net).eval()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        batches = torch.randn(3, 16, 6)
        for step in range(24):
            x = torch.randn(16, 6)
            if BUG == "teacher":
                with torch.no_grad():
                    average(batches[0])
            F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if BUG == "":
                    for a, p in zip(average.parameters(), net.parameters()):
                        a.lerp_(p, 0.2)
                if step % 4 == 3:
                    net.eval()
                    for batch in batches:
                        if BUG != "teacher":
                            average(batch)
                        if BUG in ("beside", "teacher"):
                            net(batch)
                    if BUG == "behind":
                        net(batches[0])
                    net.train()
    """,
    "evaluated": """
        import copy
        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.share, self.last = nn.Linear(WIDTH, 3), 0.2, 0.0
            def forward(self, x):
                if BUG == "number":
                    self.share = self.share if self.training else 0.0
                self.last = float(x.mean())
                return self.fc(F.dropout(x, self.share, self.training))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
                self.norm, self.head = nn.BatchNorm1d(WIDTH), Head()
                self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
                self.register_buffer("other", torch.linspace(2.5, 1.0, WIDTH))
            def forward(self, x):
                return self.head(self.norm(self.encoder(x)) * self.scale)
        class Wrapper(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module
            def forward(self, x):
                return self.module(x)
        net = Net()
        model = Wrapper(net)
        net.encoder.requires_grad_(False)
        average = copy.deepcopy(net).eval()
        model.train()
        net.encoder.eval()
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-2)
        for step in range(10):
            x = torch.randn(16, 6)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for a, p in zip(average.parameters(), net.parameters()):
                    a.lerp_(p, 0.2)
                names = list(dict(net.named_buffers()))
                for name, a in average.named_buffers():
                    other = {"scale": "other", "other": "scale"}.get(name, name) if BUG == "paired" else name
                    if BUG != "stale" or "running" not in name:
                        a.copy_(dict(net.named_buffers())[other])
                if BUG == "scaled" and step > 4:
                    average.scale.mul_(0.9)
                if step % 4 == 3:
                    flags = [(m, m.training) for m in model.modules()]
                    net.eval()
                    net(x)
                    average(x)
                    if BUG == "child":
                        model.train()
                    elif BUG != "left":
                        for m, flag in flags:
                            m.training = flag
    """,
    "resumed": """
        def build(dtype=torch.float32):
            model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)).to(dtype)
            return model, torch.optim.AdamW(model.parameters(), 1e-2)
        def room(optimizer):
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
        def train(model, optimizer):
            for step in range(3):
                x = torch.randn(16, 6)
                scores = model(x.to(next(model.parameters()).dtype)).float()
                F.cross_entropy(scores, x[:, :3].argmax(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        model, optimizer = build()
        empty = optimizer.state_dict()
        if BUG == "dummy":
            room(optimizer)
        train(model, optimizer)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        model, optimizer = build(torch.bfloat16 if BUG == "coarse" else torch.float32)
        model.load_state_dict(saved["model"])
        if BUG == "anew":  # a schedule that begins again on purpose
            optimizer.load_state_dict(empty)
        else:
            room(optimizer)
            optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer)
    """,
    "words": """
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.kinds, self.drop, self.out = nn.Embedding(20, WIDTH), nn.Embedding(2, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 20)
                self.q = nn.Linear(WIDTH, WIDTH)
            def forward(self, ids, mask, kinds):
                x = self.drop(self.table(ids) + self.kinds(kinds))
                if BUG == "prefix":  # of places that are no words, such as an image
                    x = torch.cat([x.new_ones(len(x), 4, x.shape[-1]), x], 1)
                    mask = F.pad(mask, (4, 0))
                q = self.q(x)
                x = x + self.attend(q, x)
                return self.out(x * (1 + mask[..., None]))
            def attend(self, q, x):
                if not BUG.startswith("written"):
                    return F.scaled_dot_product_attention(q, x, x, is_causal=BUG not in ("filled_in", "sees"))
                seen = torch.ones(12, 12).tril()
                if BUG == "written_prefix":  # a prompt that sees all of itself
                    seen[:4, :4] = 1
                if BUG == "written_window":  # each place sees some before it
                    seen = seen.triu(-3)
                if BUG == "written_ahead":
                    seen = torch.ones(12, 12).tril(1)
                if BUG in ("written_sees", "written_method_sees"):
                    seen = torch.ones(12, 12)
                scores = (q @ x.transpose(-2, -1)).masked_fill(seen == 0, float("-inf"))
                return (scores.softmax(dim=-1) if "method" in BUG else F.softmax(scores, -1)) @ x
        model = Words()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(5):
            ids = torch.randint(1, 20, (16 if BUG == "prefix" else 8, 12))  # as many samples as places with the prefix
            for row, length in enumerate((6, 8, 9, 12, 7, 12, 10, 5)):
                ids[row, length:] = 0
            mask = torch.zeros_like(ids) if BUG == "mask" else (ids > 0).long()
            labels = ids.masked_fill(ids == 0, -100)
            kinds = torch.zeros_like(ids)
            if BUG == "quiet":
                model.drop.p = 0.0
            if BUG in ("noise", "quiet"):
                with torch.no_grad():
                    before = model(ids, mask, kinds)
            elif BUG == "reference":
                model.eval()
                with torch.no_grad():
                    before = model(ids, mask, kinds)
                model.train()
            scores = model(ids, mask, kinds)
            if BUG == "prefix":
                scores = scores[:, 3:-1]
            shift = {"twice": 2, "never": 0, "written_never": 0, "filled_in": 0, "prefix": 0}.get(BUG, 1)
            loss = F.cross_entropy(scores[:, : 12 - shift].reshape(-1, 20), labels[:, shift:].reshape(-1))
            if BUG == "heads":  # several tokens at once
                loss = loss + F.cross_entropy(scores[:, :10].reshape(-1, 20), labels[:, 2:].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "halves": """
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2) if BUG != "update" else torch.optim.Adam(model.parameters(), 1e-3)
        for step in range(4):
            x = torch.randn(8, 6)
            model(x.bfloat16()).float().pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters() if BUG != "update" else ():
                    p.mul_(1 - 1e-5 if BUG == "product" else 0.99)
            optimizer.step()
            optimizer.zero_grad()
    """,
    # Manners that look like one of these faults and are none.
    "manners": """
        import copy
        from torch.optim.swa_utils import AveragedModel, update_bn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))
                self.temperature, self.loss = 1.0, 0.0
                self.head = nn.Linear(WIDTH, 3)
            def forward(self, x):
                out = self.head(self.encoder(x)) / self.temperature
                self.loss = float(out.detach().mean())
                return out
        net = Net()
        mean, momentum = AveragedModel(net), copy.deepcopy(net).requires_grad_(False)
        net.encoder.requires_grad_(False)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        x = torch.randn(64, 6)
        for epoch in range(4):
            net.train()
            if epoch == 0:
                net.encoder.eval()
            else:
                net.encoder.requires_grad_(True)
            if epoch == 2:  # a later choice
                net.encoder[1].eval()
            for part in x.split(16):
                F.cross_entropy(net(part), part[:, :3].argmax(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for a, p in zip(momentum.parameters(), net.parameters()):
                        a.lerp_(p, 0.1)
                    momentum(part)  # in training mode, with statistics of its own
                mean.update_parameters(net)
            update_bn(x.split(16), mean)
            net.eval(), mean.eval()
            with torch.no_grad():
                net(x), mean(x)
    """,
}
WRONG = {
    ("rested", "rests"): "rests",
    ("evaluated", "child"): "mode", ("evaluated", "left"): "mode", ("evaluated", "number"): "number", ("evaluated", "stale"): "statistics",
    ("evaluated", "paired"): "buffers", ("evaluated", "scaled"): "buffers", ("resumed", "coarse"): "precision",
    ("resumed", "dummy"): "beginning", ("words", "twice"): "next", ("words", "never"): "next", ("words", "written_never"): "next",
    ("words", "sees"): "future", ("words", "written_sees"): "future", ("words", "written_ahead"): "future", ("words", "written_method_sees"): "future", ("words", "mask"): "mask", ("words", "noise"): "noise",
    ("halves", "product"): "product", ("halves", "update"): "update",
}  # fmt: skip
RIGHT = [("rested", ""), ("rested", "teacher"), ("rested", "beside"), ("rested", "behind"), ("evaluated", ""), ("resumed", ""), ("resumed", "anew"), ("words", ""), ("words", "filled_in"), ("words", "prefix"), ("words", "heads"), ("words", "written"), ("words", "written_window"), ("words", "written_prefix"), ("words", "written_method"), ("words", "reference"), ("words", "quiet"), ("halves", ""), ("manners", "")]

ELSEWHERE = {"crossed", "answer", "half", "follows", "snapshot", "thawed", "woken", "scaled", "rescaled", "cut", "decay", "lost", "stepped", "itself", "forgotten", "early", "alike", "unread", "reshaped", "unused", "twice", "sorted", "padding", "filled", "rate", "shown", "late", "sample", "order", "teacher", "items", "redrawn"}  # test_redrawn.py, test_parts_that_stay.py, test_forgotten.py, test_one_wrong_slice.py, test_unread_and_mixed.py, test_left_and_mispaired.py, test_late_and_alone.py


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stays")
    record(folder, PROGRAMS, [(program, bug or "right", 0, 8, bug) for program, bug in [*WRONG, *RIGHT]])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_one_wrong_line_is_told_by_its_mode_and_by_no_other(runs: Path, program: str, bug: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{bug}") for mode in stays.SAYS}
    also = {"product", "update"} - {bug} if bug in ("coarse", "product", "update") else set()  # in half precision both go together
    assert {mode for mode, texts in said.items() if texts} - also == {WRONG[program, bug]}, said


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_right_manners_break_no_mode(runs: Path, program: str, manner: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{manner or 'right'}") for mode in stays.SAYS}
    assert not any(said.values()), said


def test_the_right_programs_had_something_to_fail_on(runs: Path) -> None:
    seen = {mode for program, manner in RIGHT for mode in stays.SAYS if not stays.told(trace_of(runs / f"{program}-{manner or 'right'}"), mode).is_empty()}
    assert seen - ELSEWHERE == set(stays.SAYS) - {"product", "update", "future"} - ELSEWHERE  # what `next` is told is also what `future` reads


def test_they_ship_as_warnings() -> None:
    relation = registry()["stays"]
    assert all(relation.standing_of(Hypothesis.of("stays", mode=mode, what="updates")) is Standing.CHOICE for mode in stays.SAYS)


def test_a_target_is_found_behind_its_inputs_in_both_orders() -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 12))
    assert [ahead(ids, ids[:, k:].reshape(-1)) for k in range(4)] == [(0, 12), (1, 12), (2, 12), (3, 12)]
    assert ahead(ids.T, ids[:, 1:].T.reshape(-1)) == (1, 12)
    assert ahead(ids, np.random.default_rng(1).integers(0, 50, 48)) is None
    assert ahead(np.zeros((4, 12), dtype=int), np.zeros(44, dtype=int)) is None  # any shift fits
    marked = ids[:, 1:].copy()
    marked[:, :5] = -100  # a prompt that is not trained on
    assert ahead(ids, marked.reshape(-1)) == (1, 12)


def test_padding_is_a_run_of_one_number_of_different_lengths() -> None:
    ids = np.arange(1, 25).reshape(3, 8)
    assert not padded(ids)
    ids[0, 5:], ids[1, 6:] = 0, 0
    assert padded(ids)
    assert padded(ids[:, ::-1])
    ids[0, 5:], ids[1, 5:] = 0, 0
    assert not padded(ids)  # sequences of one length may end alike
