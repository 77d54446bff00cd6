"""Mode `teacher` of `stays`: a loaded model that nothing trains, in the mode in which modules are made."""

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
}
BATCHES = "norm (BatchNorm1d) normalises by the batch and moves its statistics: Net was loaded, nothing trains it"
WRONG = {"left_out": BATCHES, "disk": BATCHES, "free": BATCHES, "frozen": BATCHES, "probe": BATCHES, "drops": "drop (Dropout) drops out: Net was loaded", "drops_free": "drop (Dropout) drops out: Net was loaded"}
RIGHT = ("eval", "part", "meant", "around", "each", "held", "copy", "moved", "plain", "random")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    record(folder, PROGRAMS, [*(("taught", bug, 0, 8, bug) for bug in (*WRONG, *RIGHT)), ("judged", "right", 0, 8, "")])
    return folder


@pytest.mark.parametrize("bug", WRONG)
def test_a_teacher_that_was_not_set_to_evaluate_is_told_with_the_part_that_minds(runs: Path, bug: str) -> None:
    assert WRONG[bug] in " ".join(failed_of("stays", "teacher", runs / f"taught-{bug}"))


@pytest.mark.parametrize("manner", RIGHT)
def test_who_sets_the_mode_or_trains_it_breaks_none(runs: Path, manner: str) -> None:
    assert not failed_of("stays", "teacher", runs / f"taught-{manner}")


def test_statistics_that_are_made_anew_behind_the_training_break_none(runs: Path) -> None:
    assert not failed_of("stays", "teacher", runs / "judged-right")
