"""Small programs, recorded as they run: what rules of their healthy form say of them when one line is wrong.

One process records all of them; each fault is checked by the rules of two healthy runs with another seed and size.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")
from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.checker import check

PROGRAMS = {
    "grouped": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm, self.head = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            def forward(self, x):
                h = self.norm(torch.relu(self.body(x)))
                return self.head(h), h
        def penalty(h):
            return (h * 0 if BUG == "constant" else h).square().mean()
        def groups(model):
            few = [p for p in model.parameters() if p.ndim < 2]
            many = [p for p in model.parameters() if p.ndim > 1]
            if BUG == "decays_all":
                return [{"params": many + few, "weight_decay": 0.1}]
            return [{"params": many, "weight_decay": 0.1}, {"params": few, "weight_decay": 0.0}]
        x = torch.randn(32, 8)
        loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 4, shuffle=BUG != "unshuffled")
        model = Net()
        if BUG == "frozen":
            model.body.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
        def train():
            done = 0
            for epoch in range(4):
                for i, (a, b) in enumerate([next(iter(loader))] * 8 if BUG == "same_batch" else loader):
                    if BUG == "ends_early" and epoch == 2 and i == 3:
                        break
                    optimizer.zero_grad()
                    out, h = model(a)
                    loss = F.cross_entropy(out, b, reduction="sum" if BUG == "summed" else "mean")
                    share = 0.1 / (3 + done)
                    done += BUG != "stands_still"
                    loss = loss + (0 if BUG == "no_term" else 0.1 + share) * penalty(h)
                    if BUG == "twice":
                        loss.backward(retain_graph=True)
                    loss.backward()
                    if BUG == "edits":
                        for p in model.parameters():
                            p.grad.mul_(0.5)
                    if BUG != "unclipped":
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    if BUG == "updates_twice":
                        optimizer.step()
                    schedule.step()
                    if BUG == "steps_twice":
                        schedule.step()
                    if BUG == "rate_rests":
                        for group in optimizer.param_groups:
                            group["lr"] = 1e-2
        train()
    """,
    "accumulates": """
        class LM(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)
            def forward(self, t):
                return self.head(self.embed(t))
        model = LM()
        optimizer = torch.optim.Adam([{"params": model.embed.parameters(), "lr": 0.01 if BUG == "same_rate" else 0.001}, {"params": model.head.parameters()}], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for i in range(8):
            for micro in range(3):
                t = torch.randint(0, 12, (4, 5))
                (F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()) / 3).backward()
                if BUG == "steps_each_microbatch":
                    schedule.step()
                if BUG == "loses_some" and micro == 1:
                    model.embed.weight.grad = None
            optimizer.step()
            if BUG != "steps_each_microbatch":
                schedule.step()
            optimizer.zero_grad()
    """,
    "resumes": """
        x = torch.randn(32, 8)
        def build():
            model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9 ** k)
        def train(first, last, model, optimizer, schedule):
            for epoch in range(first, last):
                order = torch.Generator().manual_seed(epoch)
                for (a,) in DataLoader(TensorDataset(x), 4, shuffle=True, generator=order):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(a), a[:, :3])
                    (loss / 8 if BUG == "divided" else loss).backward()
                    optimizer.step()
                    schedule.step()
            more = {} if BUG == "lost_part" else {"seed": SEED}
            torch.save({**more, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch}, f"{OUT}/last.pt")
        parts = build()
        train(0, 2, *parts)
        model, optimizer, schedule = build()
        file = torch.load(f"{OUT}/last.pt", weights_only=True)
        model.load_state_dict(file["model"])
        optimizer.load_state_dict(file["optimizer"])
        if BUG != "no_schedule":
            schedule.load_state_dict(file["schedule"])
        if BUG == "rate_anew":
            optimizer.param_groups[0]["lr"] = 1e-2
        if BUG == "count_anew":
            for state in optimizer.state.values():
                state["step"].zero_()
        train({"epoch_anew": 0, "epoch_again": 1}.get(BUG, file["epoch"] + 1), 4, model, optimizer, schedule)
    """,
}
FAULTS = {  # program, fault: relation, a word of what was seen, step
    ("grouped", "constant"): ("varies", "0.0 at each", 7),
    ("grouped", "stands_still"): ("varies", "0.03333333333333333 at each", 7),
    ("grouped", "decays_all"): ("option", "is 0.1, and the most in its optimizer is 0.1", 0),
    ("grouped", "ends_early"): ("resumed", "4 batches", 18),
    ("grouped", "edits"): ("applied", "6 of 6 gradients were written by something else", 0),
    ("grouped", "steps_twice"): ("paced", "2 step(s)", 0),
    ("grouped", "summed"): ("argument", "reduction is sum", 0),
    ("grouped", "twice"): ("applied", "no model ran in between", 0),
    ("grouped", "updates_twice"): ("applied", "no backward ran in between", 1),
    ("grouped", "unclipped"): ("applied", "no gradient was clipped", 0),
    ("grouped", "unshuffled"): ("fresh", "without a draw", -1),
    ("grouped", "frozen"): ("progress", "body.weight has not moved", 1),
    ("grouped", "same_batch"): ("fresh", "batch of the step before again", 1),
    ("grouped", "rate_rests"): ("paced", "0.01, 0.01 after 0.01, 0.01", 1),
    ("grouped", "no_term"): ("varies", "1.0 times this number", 2),
    ("accumulates", "same_rate"): ("option", "lr of embed.weight is 0.01", 0),
    ("accumulates", "steps_each_microbatch"): ("paced", "3 step(s)", 0),
    ("accumulates", "loses_some"): ("applied", "1 of 3 gradients were cleared", 0),
    ("resumes", "no_schedule"): ("resumed", "not at 16.0", 15),
    ("resumes", "rate_anew"): ("resumed", "begins with 0.01", 16),
    ("resumes", "count_anew"): ("resumed", "begins with 0.0", 16),
    ("resumes", "divided"): ("varies", "where the loss function gave", 0),
    ("resumes", "lost_part"): ("resumed", "a file without seed", 15),
    ("resumes", "epoch_anew"): ("resumed", "0.0 after 1.0", 16),
    ("resumes", "epoch_again"): ("resumed", "again, tensor by tensor", 16),
}
RELATIONS = {name: registry()[name] for name in ("option", "paced", "varies", "applied", "resumed", "argument", "fresh", "progress")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truths")
    jobs = [(name, how, seed, width, "") for name in PROGRAMS for how, seed, width in (("a", 0, 16), ("b", 1, 16), ("other", 2, 24))]
    record(folder, PROGRAMS, [*jobs, *((program, bug, 2, 24, bug) for program, bug in FAULTS)])
    return folder


@cache
def pack(folder: Path, program: str) -> Pack:
    rules, _ = infer(shards.of_runs([folder / f"{program}-a", folder / f"{program}-b"]), list(RELATIONS.values()), options=Options())
    return Pack(list(rules))


def violations(folder: Path, program: str, how: str) -> list[Violation]:
    return check(Trace.load([folder / f"{program}-{how}"]), [pack(folder, program)], relations=RELATIONS).violations


@pytest.mark.parametrize("program", PROGRAMS)
def test_another_seed_and_size_break_no_rule(runs: Path, program: str) -> None:
    assert len(pack(runs, program).invariants) >= 5
    assert [(v.text, v.seen) for v in violations(runs, program, "other")] == []


@pytest.mark.parametrize(("program", "bug"), FAULTS)
def test_one_wrong_line_is_found_and_said(runs: Path, program: str, bug: str) -> None:
    relation, seen, step = FAULTS[program, bug]
    found = [v for v in violations(runs, program, bug) if v.relation == relation and seen in v.seen]
    assert found, [(v.relation, v.seen, v.step) for v in violations(runs, program, bug)]
    assert found[0].step == step
    assert found[0].function
    assert found[0].expected
