"""Modes `teacher` and `items` of `stays`: a loaded model that nothing trains, in the mode in which modules are made; one item of a list in the place of all."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import failed_of, record

pytest.importorskip("torch")

PROGRAMS = {
    "taught": """
        class Net(nn.Module):
            def __init__(self, width, drops=0.0, norm=True):
                super().__init__()
                self.first, self.norm, self.drop, self.last = nn.Linear(6, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.Dropout(drops), nn.Linear(width, 3)
            def forward(self, x):
                return self.last(self.drop(self.norm(self.first(x)).relu()))
        class Both(nn.Module):
            def __init__(self, student, teacher):
                super().__init__()
                self.student, self.teacher = student, teacher
        student, teacher = Net(WIDTH), Net(8 if BUG == "copy" else 16, 0.1 if BUG in ("drops", "drops_free") else 0.0, BUG not in ("drops", "drops_free", "plain"))
        if BUG == "disk":
            torch.save(teacher.state_dict(), f"{OUT}-teacher.pt")
            teacher.load_state_dict(torch.load(f"{OUT}-teacher.pt"))
        elif BUG != "random":
            teacher.load_state_dict({k: v.clone() for k, v in (student if BUG == "copy" else teacher).state_dict().items()})
        if BUG == "eval":
            teacher.eval()
        elif BUG == "part":
            teacher.norm.eval()
        elif BUG == "meant":
            teacher.train()
        elif BUG == "around":
            Both(student, teacher).train()
        if BUG == "frozen":
            teacher.requires_grad_(False)
        head = nn.Linear(3, 3)
        held = [*student.parameters(), *(teacher.last.parameters() if BUG == "held" else ()), *(head.parameters() if BUG == "probe" else ())]
        optimizer = torch.optim.SGD(held, 0.05)
        for step in range(10):
            x = torch.randn(8, 6)
            if BUG == "each":
                teacher.eval()
            if BUG in ("free", "drops_free"):
                with torch.no_grad():
                    wanted = teacher(x)
            else:
                wanted = teacher(x).detach() if BUG != "held" else teacher(x)
            optimizer.zero_grad()
            F.mse_loss(student(x), head(wanted)).backward()
            optimizer.step()
            if BUG == "moved":
                with torch.no_grad():
                    for p in teacher.parameters():
                        p.mul_(0.99)
    """,
    "judged": """
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        small = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(small.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            F.mse_loss(small(torch.randn(8, 6)), torch.randn(8, 3)).backward()
            optimizer.step()
        for _ in range(12):  # statistics made anew, behind the training
            with torch.no_grad():
                model(torch.randn(8, 6))
    """,
    "layers": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                items = [nn.Linear(6, 6) if BUG == "shared" else nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 6)) for _ in range(2 if BUG == "two" else 4)]
                self.first, self.layers, self.last = nn.Linear(6, 6), nn.ModuleList(items[:1] * 4 if BUG == "shared" else items), nn.Linear(6, 3)
                self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))
            def forward(self, x, step):
                x = self.first(x)
                if BUG == "chosen":
                    return self.last(self.layers[step % 2](x))
                for i in range(1 if BUG == "one" else 3 if BUG == "some" else len(self.layers)):
                    at = {"same": 0, "last": -1, "mixed": i // 2, "one": 2, "some": 0, "two": 0, "turns": step % 4}.get(BUG, i)
                    for _ in range(4 if BUG == "frozen" else 1):
                        x = x + self.norms[0 if BUG == "norm" else i](self.layers[at](x))
                if BUG == "both":
                    x = self.layers[0](x) + self.layers[0](x)
                return self.last(x)
        net = Net()
        if BUG == "frozen":
            net.layers.requires_grad_(False), net.layers[1].requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
        for step in range(6):
            optimizer.zero_grad()
            F.mse_loss(net(torch.randn(8, 6), step), torch.randn(8, 3)).backward()
            optimizer.step()
    """,
}
OTHERS = "in a pass and none of the 3 others of"
ONE_FOR_ALL = {"same": f"layers.0 (Sequential) is gone through 4 times {OTHERS} layers is", "last": f"layers.3 (Sequential) is gone through 4 times {OTHERS} layers is", "norm": f"norms.0 (BatchNorm1d) is gone through 4 times {OTHERS} norms is"}
EACH = ("right", "mixed", "one", "some", "chosen", "two", "shared", "turns", "both", "frozen")
BATCHES = "norm (BatchNorm1d) normalises by the batch and moves its statistics: Net was loaded, nothing trains it"
WRONG = {"left_out": BATCHES, "disk": BATCHES, "free": BATCHES, "frozen": BATCHES, "probe": BATCHES, "drops": "drop (Dropout) drops out: Net was loaded", "drops_free": "drop (Dropout) drops out: Net was loaded"}
RIGHT = ("eval", "part", "meant", "around", "each", "held", "copy", "moved", "plain", "random")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    record(folder, PROGRAMS, [*(("taught", bug, 0, 8, bug) for bug in (*WRONG, *RIGHT)), ("judged", "right", 0, 8, ""), *(("layers", bug, 0, 8, bug) for bug in (*ONE_FOR_ALL, *EACH))])
    return folder


@pytest.mark.parametrize("bug", WRONG)
def test_a_teacher_that_was_not_set_to_evaluate_is_told_with_the_part_that_minds(runs: Path, bug: str) -> None:
    assert WRONG[bug] in " ".join(failed_of("stays", "teacher", runs / f"taught-{bug}"))


@pytest.mark.parametrize("manner", RIGHT)
def test_who_sets_the_mode_or_trains_it_breaks_none(runs: Path, manner: str) -> None:
    assert not failed_of("stays", "teacher", runs / f"taught-{manner}")


def test_statistics_that_are_made_anew_behind_the_training_break_none(runs: Path) -> None:
    assert not failed_of("stays", "teacher", runs / "judged-right")


@pytest.mark.parametrize("bug", ONE_FOR_ALL)
def test_one_item_in_the_place_of_all_is_told_with_its_list(runs: Path, bug: str) -> None:
    assert ONE_FOR_ALL[bug] in " ".join(failed_of("stays", "items", runs / f"layers-{bug}"))


@pytest.mark.parametrize("manner", EACH)
def test_items_that_are_chosen_shared_or_gone_through_break_none(runs: Path, manner: str) -> None:
    assert not failed_of("stays", "items", runs / f"layers-{manner}")
