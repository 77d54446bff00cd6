"""Modes of `stays` on parts of a program: parameters that are thawed, frozen norms, clipping behind a scaler, checkpoints, moments, gradients of microbatches, schedulers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.trained import failed_of, record, trace_of

pytest.importorskip("torch")

from proctor.instrument.probes.moments import fit
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry, stays

PROGRAMS = {
    "thaws": """
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        for step in range(9):
            if step == 4:
                model[0].requires_grad_(True)
                if BUG == "":
                    optimizer.add_param_group({"params": list(model[0].parameters())})
                elif BUG == "anew":
                    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            x = torch.randn(16, 6)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            if BUG == "by hand" and step >= 4:
                for p in model[0].parameters():
                    p.data -= 0.01 * p.grad
            model.zero_grad()
    """,
    "freezes": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.head = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()), nn.Linear(WIDTH, 3)
            def forward(self, x):
                return self.head(self.encoder(x))
            def train(self, mode=True):
                super().train(mode)
                if BUG == "" and mode:
                    self.encoder.eval()
                return self
        model = Net()
        if BUG != "later":
            model.encoder.requires_grad_(False)
        model.encoder.eval()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        for step in range(4):
            model.train()
            if BUG == "meant":
                model.encoder.train()
            x = torch.randn(16, 6)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model.encoder.eval()
    """,
    "scales": """
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=BUG != "off")
        others = []
        for step in range(4):
            if BUG in ("anew", "given", "both") and step == 2:
                state = scaler.state_dict()
                others += [scaler] if BUG == "both" else []
                scaler = torch.amp.GradScaler("cpu")
                if BUG == "given":
                    scaler.load_state_dict(state)
            x = torch.randn(16, 6)
            scaler.scale(F.cross_entropy(model(x), x[:, :3].argmax(1))).backward()
            if BUG not in ("clipped", "off"):
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters() if BUG == "" else list(model.parameters()), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """,
    "checkpoints": """
        from torch.utils.checkpoint import checkpoint
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
            def forward(self, x):
                return self.base(x) + self.adapter(x)
        table, block, head = nn.Embedding(9, WIDTH).requires_grad_(False), Block(), nn.Linear(WIDTH, 3)
        model = nn.ModuleList([table, block, head])
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        for step in range(4):
            x = table(torch.randint(0, 9, (8,)))
            if BUG != "cut":
                x.requires_grad_(True)
            if BUG == "frozen":
                with torch.no_grad():
                    checkpoint(block, x, use_reentrant=True)
            F.cross_entropy(head(checkpoint(block, x, use_reentrant=True)), torch.randint(0, 3, (8,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "moments": """
        class Own(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, dict(lr=0.01))
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    moment = state["momentum"]
                    trust = float(p.norm()) if BUG == "trust" else 1.0
                    moment.mul_(0.9).add_(p.grad, alpha=trust)
                    update = moment.view(-1) if BUG in ("length", "share") else moment.view(-1).clone()
                    update.div_(update.norm() if BUG == "length" else 1 + p.shape[0] / 8)
                    p.add_(update.view_as(p), alpha=-0.01)
        model = nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, 3, bias=False))
        optimizer = Own(model.parameters())
        for step in range(5):
            x = torch.randn(16, 6)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "accumulates": """
        model, critic = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        second = torch.optim.SGD(critic.parameters(), 0.1)
        def propagate(loss):
            loss.backward()
        def loss():
            x = torch.randn(16, 6)
            return F.cross_entropy(critic(model(x)), x[:, :3].argmax(1)) / 4
        for step in range(12):
            if BUG == "closure":
                def closure():
                    optimizer.zero_grad()
                    propagate(loss())
                propagate(loss())
                optimizer.step(closure)
                optimizer.zero_grad(), second.zero_grad()
                continue
            parts = []
            for part in range(4):
                if BUG in ("cleared", "cleared_model") or BUG == "skipped" and (step, part) in ((0, 1), (5, 1)) or BUG in ("tasks", "kept", "zeroed"):
                    if BUG != "cleared_model":
                        optimizer.zero_grad(set_to_none=BUG != "zeroed")
                        second.zero_grad(set_to_none=BUG != "zeroed") if BUG != "kept" else None
                    else:
                        model.zero_grad(), critic.zero_grad()
                if BUG == "attacked":
                    for _ in range(2):
                        x = torch.randn(16, 6, requires_grad=True)
                        critic(model(x)).sum().backward()
                        optimizer.zero_grad(), second.zero_grad()
                    propagate(loss())
                    break
                propagate(loss())
                if BUG == "two":  # one of two optimizers steps behind its own pass, and what that gave the other is cleared
                    (optimizer if part % 2 else second).step()
                    optimizer.zero_grad(), second.zero_grad()
                if BUG == "by_hand" and part < 3:
                    with torch.no_grad():
                        for p in (*model.parameters(), *critic.parameters()):
                            p -= 0.01 * p.grad
                    optimizer.zero_grad(), second.zero_grad()
                parts.append([p.grad.clone() for p in (*model.parameters(), *critic.parameters()) if p.grad is not None])
            if BUG == "tasks":
                for p, *grads in zip([*model.parameters(), *critic.parameters()], *parts):
                    p.grad = torch.stack(grads).mean(0)
            optimizer.step(), second.step()
            optimizer.zero_grad(), second.zero_grad()
    """,
    "schedules": """
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        class Plan:
            def __init__(self):
                self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
                self.second = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0) if BUG == "two" else None
        plan = Plan()
        x = torch.randn(40, 6)
        data = TensorDataset(x, x[:, :3].argmax(1))
        first, second = DataLoader(data, 8, shuffle=True), DataLoader(data, 10)
        def batches():
            given = iter(first)
            while True:
                try:
                    yield next(given)
                except StopIteration:
                    given = iter(first)
                    yield next(given)
        def train(epoch, features, labels):
            F.cross_entropy(model(features), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if BUG == "by_hand":
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (epoch + 2)
        stream = batches()
        for epoch in range(1 if BUG == "once" else 3):
            if BUG in ("asks", "asks_long"):
                for _ in range(5 if BUG == "asks" else 1):
                    train(epoch, *next(stream))
            else:
                for features, labels in first:
                    train(epoch, features, labels)
            with torch.no_grad():
                for features, labels in second:
                    model(features)
            LINE
    """,
}
WRONG = {
    ("thaws", "lost"): "thawed", ("freezes", "woken"): "woken", ("scales", "clipped"): "scaled", ("scales", "anew"): "rescaled", ("checkpoints", "cut"): "cut",
    ("moments", "length"): "decay", ("moments", "share"): "decay",
    ("never", "never"): "stepped", ("never", "asks"): "stepped", ("never", "asks_long"): "stepped", ("accumulates", "cleared"): "lost", ("accumulates", "cleared_model"): "lost",
}  # fmt: skip
RIGHT = [
    ("thaws", ""), ("thaws", "anew"), ("thaws", "by hand"), ("freezes", ""), ("freezes", "meant"), ("freezes", "later"), ("scales", ""), ("scales", "list"), ("scales", "off"), ("scales", "given"), ("scales", "both"),
    ("checkpoints", ""), ("checkpoints", "frozen"), ("moments", ""), ("moments", "trust"),
    ("schedules", ""), ("never", "two"), ("never", "once"), ("never", "by_hand"), ("warms_up", ""),
    *(("accumulates", manner) for manner in ("", "closure", "skipped", "tasks", "kept", "zeroed", "attacked", "two", "by_hand")),
]  # fmt: skip
# What a program's lines are is the question: each has its own.
for name, line in {"never": "pass", "schedules": "plan.scheduler.step()", "warms_up": "if epoch >= 10: plan.scheduler.step()"}.items():
    PROGRAMS[name] = PROGRAMS["schedules"].replace("LINE", line)
MODES = tuple(sorted(set(WRONG.values())))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    record(folder, PROGRAMS, [(program, bug or "right", 0, 8, bug) for program, bug in [*WRONG, *RIGHT]])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_one_wrong_line_is_told_by_its_mode(runs: Path, program: str, bug: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{bug}") for mode in MODES}
    assert {mode for mode, texts in said.items() if texts} == {WRONG[program, bug]}, said


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_right_manners_break_none_of_them(runs: Path, program: str, manner: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{manner or 'right'}") for mode in MODES}
    assert not any(said.values()), said


def test_the_right_programs_had_something_to_fail_on(runs: Path) -> None:
    seen = {mode for program, manner in RIGHT for mode in MODES if not stays.told(trace_of(runs / f"{program}-{manner or 'right'}"), mode).is_empty()}
    assert seen == set(MODES)


def test_they_are_choices() -> None:
    relation = registry()["stays"]
    assert all(relation.standing_of(Hypothesis.of("stays", mode=mode, what="updates")) is Standing.CHOICE for mode in MODES)


def test_a_moment_is_written_as_a_sum_of_the_terms_that_it_has() -> None:
    random = np.random.default_rng(0)
    old, grad, data = (random.normal(size=100) for _ in range(3))
    terms = (old, grad, grad**2, data)
    shares = fit(0.9 * old + 0.1 * grad, terms, 2e-5)
    assert shares is not None and np.allclose(shares, [0.9, 0.1, 0, 0])
    assert fit(np.abs(old), terms, 2e-5) is None  # no sum of them
    assert fit(old, (grad, grad, grad**2, data), 2e-5) is None  # which of two that are alike is not known
    assert fit(0.9 * old + 1e6 * grad, (old, 1e7 * grad, grad**2, data), 2e-5) is None  # what is left of the old value is rounded away
