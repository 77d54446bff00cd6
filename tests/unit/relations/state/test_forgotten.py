"""Modes of `stays` on what a program forgets or mixes up once: a part that no optimizer holds, a value that is taken from itself, copies of which one is, a scheduler at the wrong end of its loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record

pytest.importorskip("torch")

PROGRAMS = {
    "parts": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.middle, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            def forward(self, x):
                hidden = self.encoder(x).relu()
                return self.head(hidden + self.middle(hidden.detach() if BUG == "cut" else hidden).relu())
        model, teacher = Net(), nn.Linear(6, 3)
        if BUG == "loaded":
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        parts = {"left_out": [model.encoder], "upstream": [model.head], "frozen": [model.encoder]}.get(BUG, [model])
        if BUG in ("loaded", "cleared", "later", "by_hand"):
            parts = [model.encoder]
        if BUG == "frozen":
            model.middle.requires_grad_(False), model.head.requires_grad_(False)
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], 0.01)
        for step in range(24):
            if BUG == "later" and step == 10:
                optimizer.add_param_group({"params": [*model.middle.parameters(), *model.head.parameters()]})
            x = torch.randn(8, 6)
            (model if BUG == "cleared" else optimizer).zero_grad()
            F.mse_loss(model(x), teacher(x)).backward()
            optimizer.step()
            if BUG == "by_hand":
                with torch.no_grad():
                    for p in (*model.middle.parameters(), *model.head.parameters()):
                        p -= 0.01 * p.grad
    """,
    "chain": """
        encoder, head, teacher = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 3), nn.Linear(6, 3)
        if BUG == "loaded":
            encoder.load_state_dict({k: v.clone() for k, v in encoder.state_dict().items()})
        optimizer = torch.optim.SGD([*head.parameters(), *(encoder.parameters() if BUG == "whole" else ())], 0.01)
        for step in range(24):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            given = encoder(x).detach() if BUG == "cut" else encoder(x)
            loss = F.mse_loss(head(given), teacher(x))
            if BUG == "judge":  # what judges lies behind, as a perceptual loss does
                loss = F.mse_loss(encoder(head(torch.randn(8, WIDTH)).repeat(1, 2)), torch.zeros(8, WIDTH))
            loss.backward()
            optimizer.step()
    """,
    "judged": """
        class Judge(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale, self.shift = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
            def forward(self, student, teacher):
                return (student * self.scale + self.shift - teacher).square().mean()
        model, teacher, judge = nn.Linear(6, 3), nn.Linear(6, 3), Judge()
        files = [f"{OUT}-{name}.pt" for name in ("teacher", "judge")]
        torch.save(teacher.state_dict(), files[0]), torch.save(dict(judge.named_parameters()), files[1])
        if BUG == "by_hand_first":
            values = torch.load(files[1])
        if BUG != "by_hand":
            teacher.load_state_dict(torch.load(files[0]))
        if BUG == "loaded":
            judge.load_state_dict({k: v.clone() for k, v in judge.state_dict().items()})
        elif BUG in ("by_hand", "by_hand_too", "by_hand_first"):
            for name, value in (values if BUG == "by_hand_first" else torch.load(files[1])).items():
                judge.get_parameter(name).data.copy_(value)
        optimizer = torch.optim.SGD([*model.parameters(), *(judge.parameters() if BUG == "whole" else ())], 0.01)
        for step in range(24):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x)
            judge(model(x), wanted).backward()
            optimizer.step()
    """,
    "pairs": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.moves = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
            def forward(self, x):
                return self.encoder(x)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        def energy(a, b):
            return (a - b).square().sum(1).mean()
        for step in range(4):
            x = torch.randn(8, 6)
            state = model(x)
            moved = model.moves(state)
            loss = energy(moved, model(x.roll(1, 0)))
            if BUG == "same":
                loss = loss + (1 - energy(state, state)).relu()
            elif BUG == "loss":
                loss = loss + F.mse_loss(state, state)
            elif BUG == "shuffled":
                loss = loss + (1 - energy(state, state[torch.randperm(8)])).relu()
            elif BUG == "straight":
                loss = loss + energy(state, (state + (state.round() - state).detach()) - state.detach()) + (state - state.detach()).sum()
            elif BUG == "pairs":
                loss = loss + sum(energy(a, b) for a in (state, moved) for b in (state, moved))
            elif BUG == "twice":
                loss = loss + torch.sub(state, state, alpha=2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "targets": """
        import copy
        class Actor(nn.Linear): pass
        class Critic(nn.Linear): pass
        actor, critic = Actor(6, WIDTH), Critic(WIDTH, 1)
        later, reference = copy.deepcopy(critic), copy.deepcopy(actor)
        goals = [copy.deepcopy(actor), copy.deepcopy(critic)]
        optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (actor, critic)]
        def follow(net, copied, rate=0.05):
            with torch.no_grad():
                for p, q in zip(net.parameters(), copied.parameters()):
                    q.lerp_(p, rate)
        for step in range(44):
            x = torch.randn(8, 6)
            with torch.no_grad():
                goal = (critic if BUG == "online" else goals[1])((actor if BUG == "kept_near" else goals[0])(x))
                if BUG == "reference":
                    reference(x)
            near = reference(x).detach() if BUG == "kept_near" else 0.0
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.mse_loss(critic(actor(x)), goal + x[:, :1]).backward()
            for optimizer in optimizers:
                optimizer.step()
            if BUG == "kept_near":  # the actor has no target, and stays near to what it was
                F.mse_loss(actor(x), near).backward()
            if BUG not in ("rests", "reference_alone", "kept_near"):
                follow(actor, goals[0])
            if BUG != "reference_alone":
                follow(critic, goals[1])
            if BUG == "average":
                follow(critic, later, 0.5)
    """,
    "rates": """
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        def advance():
            scheduler.step()
        if BUG == "warm":
            scheduler.step()
        elif BUG in ("forward", "helper"):
            for _ in range(3):
                optimizer.step()  # moves nothing: there is no gradient
                advance() if BUG == "helper" else scheduler.step()
        for epoch in range(4):
            if BUG == "first":
                scheduler.step()
            elif BUG == "told":
                scheduler.step(epoch)
            for step in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                if BUG == "accumulates" and step == 0:
                    scheduler.step()
                if BUG != "accumulates" or step == 2:
                    optimizer.step()
            if BUG == "helper":
                advance()
            elif BUG not in ("first", "told", "accumulates"):
                scheduler.step()
    """,
}
WRONG = {("parts", "left_out"): "forgotten", ("chain", "left_out"): "forgotten", ("judged", "left_out"): "forgotten", ("pairs", "same"): "itself", ("pairs", "loss"): "itself", ("rates", "first"): "early", ("targets", "online"): "alike", ("targets", "rests"): "alike"}
RIGHT = [
    *(("parts", manner) for manner in ("whole", "upstream", "frozen", "loaded", "cleared", "later", "by_hand")),
    *(("chain", manner) for manner in ("whole", "loaded", "cut", "judge")),
    *(("judged", manner) for manner in ("whole", "loaded", "by_hand", "by_hand_too", "by_hand_first")),
    *(("pairs", manner) for manner in ("right", "shuffled", "straight", "pairs", "twice")),
    *(("targets", manner) for manner in ("right", "reference", "reference_alone", "kept_near", "average")),
    *(("rates", manner) for manner in ("right", "warm", "forward", "helper", "told", "accumulates")),
]
MODES = tuple(sorted(set(WRONG.values())))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forgotten")
    jobs = [(program, bug, 0, 8, bug) for program, bug in [*WRONG, *RIGHT]]
    record(folder, PROGRAMS, [job for job in jobs if job[0] != "targets"])
    for job in jobs:
        if job[0] == "targets":  # copies are looked for among all that lives in a process
            record(folder, PROGRAMS, [job])
    return folder


@pytest.mark.parametrize(("program", "bug"), list(WRONG))
def test_what_was_forgotten_is_told_by_its_mode(runs: Path, program: str, bug: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{bug}") for mode in MODES}
    assert {mode for mode, texts in said.items() if texts} == {WRONG[program, bug]}, said


@pytest.mark.parametrize(("program", "manner"), RIGHT)
def test_who_means_it_breaks_none(runs: Path, program: str, manner: str) -> None:
    said = {mode: failed_of("stays", mode, runs / f"{program}-{manner}") for mode in MODES}
    assert not any(said.values()), said


def test_texts_name_the_cause(runs: Path) -> None:
    told = {wrong: " ".join(failed_of("stays", WRONG[wrong], runs / "-".join(wrong))) for wrong in WRONG}
    assert "middle.weight and 3 more of Net: no optimizer holds" in told["parts", "left_out"], told
    assert "0.weight and 1 more of Sequential: no optimizer holds" in told["chain", "left_out"], told
    assert "a difference of a value and itself (of what Addmm gave)" in told["pairs", "same"], told
    assert "the copy of Critic follows it and is never called, while the copy of Actor is" in told["targets", "online"], told
    assert "the copy of Actor is called and never moves, while Actor trains and the copy of Critic, which is called behind it, moves" in told["targets", "rests"], told
    assert "StepLR steps at rates.py:" in told["rates", "first"], told
