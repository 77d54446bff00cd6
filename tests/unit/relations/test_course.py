"""Laws of training: one wrong line is found in a program that no rule was learned from, and the right program breaks none.

`course`, and the modes of `progress`, `fresh` and `contain` that hold of any program and are sure from the run itself.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.trained import record

pytest.importorskip("torch")
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry
from proctor.invariants.relations.course import _CHOICES, _SAYS
from proctor.invariants.trace import Trace

PROGRAMS = {
    "laws": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm, self.middle, self.head = nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            def forward(self, x):
                if BUG == "one_mask" and self.training:
                    torch.manual_seed(7)
                h = F.dropout(self.norm(torch.relu(self.body(x))), 0.2, self.training)
                return self.head(torch.relu(self.middle(h)))
            def train(self, mode=True):
                return super().train(mode or BUG == "stays_in_training")
        class Twice(torch.utils.data.Dataset):
            def __init__(self, x):
                self.x = x
            def __len__(self):
                return len(self.x)
            def __getitem__(self, i):
                return self.x[(i // 8) * 8 + i % 4]
        x = torch.randn(32, 16)
        loader = DataLoader(Twice(x) if BUG == "twice_in_a_row" else x, 4, shuffle=BUG != "twice_in_a_row")
        model = Net()
        few = [p for p in model.parameters() if p.ndim < 2]
        if BUG == "bias_left_out":
            few = [p for p in few if p is not model.head.bias]
        many = [p for p in model.parameters() if p.ndim > 1]
        decays = {"swapped": (0.0, 0.1), "all_decay": (0.1, 0.1)}.get(BUG, (0.1, 0.0))
        if BUG == "weight_frozen":
            model.middle.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip((many, few), decays)], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        averaged = Net()
        averaged.load_state_dict(model.state_dict())
        def clip():
            held = list(model.parameters())
            if BUG == "clips_copies":
                held = [p.detach().clone() for p in held]
                for copy, p in zip(held, model.parameters()):
                    copy.grad = p.grad.clone()
            torch.nn.utils.clip_grad_norm_(held, 0.01)
        for epoch in range(2):
            if (BUG != "goes_on_evaluating" or epoch == 0) and BUG != "no_eval":
                model.train()
            kept = pair = None
            for i, a in enumerate(loader):
                a = kept = a if kept is None or BUG not in ("keeps_batch", "keeps_each") else kept
                if BUG == "keeps_pairs":
                    a, pair = (pair, None) if pair is not None else (a, a)
                optimizer.zero_grad()
                out = model(a)
                loss = F.cross_entropy(out.detach().requires_grad_() if BUG == "detached" else out, a[:, :3].argmax(1))
                if BUG == "clips_first":
                    clip()
                if BUG == "steps_first":
                    optimizer.step()
                if BUG == "backward_twice":
                    loss.backward(retain_graph=True)
                if BUG != "no_backward":
                    loss.backward()
                    if BUG not in ("clips_first", "clips_last", "detached"):
                        clip()
                if BUG != "steps_first":
                    optimizer.step()
                if BUG == "steps_twice":
                    optimizer.step()
                if BUG == "clips_last":
                    clip()
                if BUG == "taken_back" or (BUG == "average_rests" and i % 3 == 2):
                    model.load_state_dict(averaged.state_dict())
            if BUG != "no_schedule":
                schedule.step()
            if BUG == "schedule_twice":
                schedule.step()
            if BUG not in ("no_eval", "eval_forgotten"):
                model.eval()
            with torch.no_grad():
                for a in DataLoader(x, 16):
                    model(a)
    """,
    # Manners of training that look like a fault and are none.
    "manners": """
        x = torch.randn(24, 16)
        g, d = nn.Sequential(nn.Linear(16, WIDTH), nn.Dropout(0.1)), nn.Linear(WIDTH, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (g, d)]
        chain = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizers[0], 2), torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)])
        for _ in range(3):
            chain.step()  # as a job that resumes
        search = torch.optim.LBFGS(d.parameters(), max_iter=3)
        for i, a in enumerate(DataLoader(x.repeat(2, 1), 8)):
            optimizers[1].zero_grad()
            d(g(a)).mean().backward()
            torch.nn.utils.clip_grad_norm_(d.parameters(), 0.01)
            optimizers[1].step()
            if i % 2 == 0:  # the other rests in every second step
                optimizers[0].zero_grad()
                (-d(g(a)).mean()).backward()
                (d(g(a)) ** 2).mean().backward()
                optimizers[0].step()
                chain.step()
            torch.nn.utils.clip_grad_norm_(g.parameters(), float("inf"))  # measures only
        def closure():
            search.zero_grad()
            loss = (d(g(x).detach()) - 1).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(d.parameters(), 0.01)
            return loss
        for _ in range(3):
            search.step(closure)
    """,
    # Statistics that are estimated in training mode, samples that are drawn in it, and one full batch beside others that a loader gives.
    "batches": """
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x, labelled = torch.randn(48, 16), torch.randn(12, 16)
        for epoch in range(3):
            model.train()
            for a in DataLoader(x, 8, shuffle=True):  # one full batch with labels, and another without in each step
                optimizer.zero_grad()
                (model(labelled).square().mean() + model(a).abs().mean()).backward()
                optimizer.step()
            torch.optim.swa_utils.update_bn(DataLoader(x, 12), model)
            with torch.no_grad():
                model(torch.randn(4, 16))
    """,
    # One sample that is learned by heart: of a set of one, and of one that is repeated.
    "by_heart": """
        model = nn.Sequential(nn.Linear(96, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        sample = torch.randn(96)
        for times in (1, 6):
            for epoch in range(6 // times):
                for a in DataLoader([sample] * times, 1, shuffle=True):
                    optimizer.zero_grad()
                    model(a).square().mean().backward()
                    optimizer.step()
    """,
    # A loss that is a module, and has no mode that matters, behind a model in a wrapper.
    "wrapped": """
        model = nn.DataParallel(nn.Sequential(nn.Linear(16, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3)))
        criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(48, 16)
        for epoch in range(2):
            model.train()
            for a in DataLoader(x, 8, shuffle=True):
                optimizer.zero_grad()
                criterion(model(a), a[:, :3].argmax(1)).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for a in DataLoader(x, 16):
                    criterion(model(a), a[:, :3].argmax(1))
    """,
    # A network of functions, which is told its mode; the only module is a transform of the samples, which has none that matters.
    "functional": """
        class Scaled(nn.Module):
            def forward(self, x):
                return (x - 0.1) / 0.9
        class Rows(torch.utils.data.Dataset):
            def __init__(self, x): self.x, self.scale = x, Scaled()
            def __len__(self): return len(self.x)
            def __getitem__(self, i): return self.scale(self.x[i])
        weights = [torch.randn(16, WIDTH, requires_grad=True), torch.randn(WIDTH, 3, requires_grad=True)]
        mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
        def net(x, training):
            h = F.batch_norm(x @ weights[0], mean, var, training=training)
            return F.dropout(h, 0.1, training=training) @ weights[1]
        optimizer = torch.optim.SGD(weights, lr=1e-2)
        for epoch in range(3):
            for a in DataLoader(Rows(torch.randn(48, 16)), 8):
                optimizer.zero_grad()
                net(a, True).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for a in DataLoader(Rows(torch.randn(32, 16)), 8):
                    net(a, False)
    """,
    # Groups that part norms and biases by their rate, which a warm-up begins at 0.
    "warm_up": """
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
        parts = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.0, weight_decay=1e-4)
        for step, a in enumerate(DataLoader(torch.randn(48, 16), 8)):
            for group, rate in zip(optimizer.param_groups, (0.2, 0.01)):
                group["lr"] = rate * step / 10
            optimizer.zero_grad()
            model(a).square().mean().backward()
            optimizer.step()
    """,
    # One layer with a part that is fixed on purpose: the scale of a weight norm, or the recurrent matrix.
    "scale": """
        last = torch.nn.utils.weight_norm(nn.Linear(WIDTH, 3))
        last.weight_g.requires_grad_(False)
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), last)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for a in DataLoader(torch.randn(24, 16), 4):
            optimizer.zero_grad()
            model(a).square().mean().backward()
            optimizer.step()
    """,
    "reservoir": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.head = nn.RNN(16, WIDTH), nn.Linear(WIDTH, 3)
                self.cell.weight_hh_l0.requires_grad_(False)
            def forward(self, x):
                return self.head(self.cell(x)[0])
        model = Net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for a in DataLoader(torch.randn(24, 5, 16), 4):
            optimizer.zero_grad()
            model(a).square().mean().backward()
            optimizer.step()
    """,
}
LAWS = {mode: Hypothesis.of("course", mode=mode, what="updates") for mode in _SAYS} | {
    "doubled": Hypothesis.of("progress", mode="doubled"),
    "undone": Hypothesis.of("progress", mode="undone"),
    "module": Hypothesis.of("contain", kind="change", role="parameter", parent="<step>", attr="data", who="module"),
}
FAULTS = {  # fault: law, a word of what was seen, step
    "no_backward": ("fed", "none of its 8 parameters", 1),
    "steps_first": ("fed", "none of its 8 parameters", 2),
    "steps_twice": ("again", "a second time with the gradients", 1),
    "clips_first": ("clips", "before the backward", 0),
    "clips_last": ("clips", "before the backward", 0),
    "clips_copies": ("shrinks", "changed no gradient", 0),
    "schedule_twice": ("successive", "right behind", 7),
    "stays_in_training": ("evaluates", "is in training mode after its eval()", 7),
    "goes_on_evaluating": ("resumes", "now trains in evaluation mode", 8),
    "one_mask": ("masks", "manual_seed(7)", 1),
    "swapped": ("reversed", "0.1 for norms and biases", 0),
    "all_decay": ("parted", "have a group of their own", 0),
    "backward_twice": ("doubled", "body.weight", 0),
    "twice_in_a_row": ("batch", "again, tensor by tensor", 3),
    "bias_left_out": ("module", "head.bias", 1),
    "weight_frozen": ("halved", "middle.weight", 0),
    "no_schedule": ("scheduled", "has never stepped", 8),
    "no_eval": ("examined", "in training mode", 7),
    "keeps_batch": ("advances", "the loader has given one since", 1),
    "keeps_each": ("consumes", "the loader gives another batch to each", 1),
    "eval_forgotten": ("restored", "as it was all along", 7),
    "detached": ("fed", "none of its 8 parameters", 1),
    "taken_back": ("undone", "has the value from before this update again", 2),
    "average_rests": ("undone", "from before the first update again, for the third time", 10),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laws")
    record(folder, PROGRAMS, [(name, "right", 0, 24, "") for name in PROGRAMS] + [("laws", bug, 0, 24, bug) for bug in (*FAULTS, "keeps_pairs")])
    return folder


def failing(trace: Trace, law: Hypothesis) -> pl.DataFrame:
    frame = registry()[law.relation].examples(trace, [law]).frame
    return frame.filter(~frame["passed"].fill_null(value=True)).sort("step")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_right_program_breaks_no_law(runs: Path, program: str) -> None:
    trace = Trace.load([runs / f"{program}-right"])
    assert {name: failing(trace, law).head(1).to_dicts() for name, law in LAWS.items() if failing(trace, law).height} == {}


@pytest.mark.parametrize("bug", FAULTS)
def test_one_wrong_line_is_found_without_learning(runs: Path, bug: str) -> None:
    trace = Trace.load([runs / f"laws-{bug}"])
    name, seen, step = FAULTS[bug]
    found = failing(trace, LAWS[name])
    assert found.height, {n: failing(trace, law).height for n, law in LAWS.items()}
    relation = registry()[LAWS[name].relation]
    detail = relation.detail(trace, LAWS[name], found.row(0, named=True))
    assert found["step"][0] == step
    assert seen in f"{detail.seen} {detail.variable}"
    assert detail.function
    assert detail.expected
    assert detail.advice


def test_two_steps_on_one_batch_may_be_meant(runs: Path) -> None:
    trace = Trace.load([runs / "laws-keeps_pairs"])
    assert [failing(trace, LAWS[law]).height > 0 for law in ("advances", "consumes")] == [True, False]


@pytest.mark.parametrize("law", LAWS)
def test_each_law_is_learned_from_a_program_that_keeps_it_and_may_be_shipped(runs: Path, law: str) -> None:
    relation = registry()[LAWS[law].relation]
    assert LAWS[law] in relation.propose(Trace.load([runs / "laws-right"]))
    assert relation.standing_of(LAWS[law]) is (Standing.CHOICE if law in (*_CHOICES, "undone") else Standing.LAW)


ACTOR_AND_CRITIC = """
    actor, critic = nn.Linear(6, WIDTH), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (actor, critic)]
    for step in range(8):
        x = torch.randn(16, 6)
        optimizers[1].zero_grad()
        (critic(x) - 9).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (10 * actor(x)).square().mean().backward()
        clipped = {"wrong": [*critic.parameters()], "both": [*actor.parameters(), *critic.parameters()]}.get(BUG, [*actor.parameters()])
        torch.nn.utils.clip_grad_norm_(clipped, 0.01)
        optimizers[0].step()
"""


def test_what_is_clipped_is_what_the_next_update_applies(tmp_path: Path) -> None:
    record(tmp_path, {"agent": ACTOR_AND_CRITIC}, [("agent", name, 0, 8, name) for name in ("right", "both", "wrong")])
    law = LAWS["reaches"]
    found = {name: failing(Trace.load([tmp_path / f"agent-{name}"]), law) for name in ("right", "both", "wrong")}
    assert [found[name].height for name in ("right", "both")] == [0, 0] and found["wrong"]["step"][0] == 0
    detail = registry()["course"].detail(Trace.load([tmp_path / "agent-wrong"]), law, found["wrong"].row(0, named=True))
    assert "which no update before the next backward applies" in detail.seen and detail.variable.endswith("weight.grad")
