"""What a checkpoint holds is found by value; one that holds a part of the training's state and not the rest is told."""

from __future__ import annotations

import argparse
import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle.selfcheck.watching.saves.held import held  # noqa: E402
from proctor.oracle.selfcheck.watching.saves.saving import judged  # noqa: E402


class Training:
    """Two updates of a small model."""

    def __init__(self, kind=torch.optim.Adam, **more):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = kind(self.model.parameters(), lr=0.1, **more)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 3)).pow(2).mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def verdict(self, *saves, scalers=()):
        moved = {id(p): True for p in self.model.parameters()}
        looked = [held(s, [self.optimizer], [self.schedule], scalers, moved) for s in saves]
        return judged([p for p, _ in looked], all(w for _, w in looked), "train.py:3")


def of(training, *names):
    return {n: getattr(training, n).state_dict() for n in names}


def test_all_of_it_is_equivalent_in_one_file_or_in_several():
    t = Training()
    assert t.verdict({**of(t, "model", "optimizer", "schedule"), "epoch": 3}).verdict == "equivalent"
    assert t.verdict(of(t, "model"), of(t, "optimizer"), of(t, "schedule")).verdict == "equivalent"


@pytest.mark.parametrize("change", [copy.deepcopy, lambda s: argparse.Namespace(**s), lambda s: [("a", s)], lambda s: {"model": {k: v.half() for k, v in s["model"].items()}, "rest": s}])
def test_the_form_does_not_matter(change):
    t = Training()
    assert t.verdict(change(of(t, "model", "optimizer", "schedule"))).verdict == "equivalent"


def test_objects_are_looked_into():
    t = Training()
    assert t.verdict({"model": t.model, "optimizer": t.optimizer, "schedule": t.schedule}).verdict == "equivalent"


@pytest.mark.parametrize("left", ["optimizer", "schedule"])
def test_what_is_left_out_is_told(left):
    t = Training()
    found = t.verdict(of(t, *({"model", "optimizer", "schedule"} - {left})))
    assert found.verdict == "different" and left in found.seen and found.culprit.source == "train.py:3"


def test_a_scaler_that_is_left_out_is_told():
    t = Training()
    names = ("model", "optimizer", "schedule")
    assert t.verdict(of(t, *names), scalers=[t.scaler]).verdict == "different"
    assert t.verdict(of(t, *names, "scaler"), scalers=[t.scaler]).verdict == "equivalent"


def test_a_part_of_the_model_that_is_left_out_is_told():
    t = Training()
    saved = of(t, "model", "optimizer", "schedule")
    del saved["model"]["1.weight"]
    found = t.verdict(saved)
    assert found.verdict == "different" and "3 of 4 parameters" in found.reason


def test_a_model_alone_is_nothing_to_go_on_from():
    t = Training()
    assert t.verdict({**of(t, "model"), "epoch": 3}).verdict == "not-applicable"
    assert t.verdict({"losses": [1.0]}).verdict == "not-applicable"


def test_a_schedule_may_be_made_from_a_number():
    t = Training()
    assert t.verdict({**of(t, "model", "optimizer"), "epoch": 2}).verdict == "inconclusive"


def test_an_optimizer_without_state_has_nothing_to_lose():
    t = Training(torch.optim.SGD)
    assert t.verdict(of(t, "model", "schedule")).verdict == "equivalent"


def test_a_state_of_another_moment_is_undecided():
    t = Training()
    saved = copy.deepcopy(of(t, "model", "optimizer"))
    t.optimizer.step()
    t.schedule.step()
    assert t.verdict({**saved, "schedule": t.schedule.state_dict()}).verdict == "inconclusive"


def test_what_cannot_be_looked_into_is_undecided():
    t = Training()
    found = t.verdict({**of(t, "model", "schedule"), "more": argparse.Namespace(f=lambda: 0)})
    assert found.verdict == "inconclusive"
