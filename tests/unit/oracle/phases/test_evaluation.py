"""Forwards without gradients between training steps are recorded apart from them and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to, record_ranks  # noqa: E402
from helpers.small_net import batch, step  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict, failing  # noqa: E402
from proctor.oracle.phases.evaluation import culprit_of  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402


class Judge(nn.Module):
    """A normalisation whose statistics matter in evaluation only, a dropout, and a last layer that may be cut; `wrong` is done in evaluation."""

    def __init__(self, part: int | None = None, wrong: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(16, 4)
        self.first, self.norm, self.drop, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), whole
        self.part, self.wrong = part, wrong
        if part is not None:
            self.last = nn.Linear(8, 4, bias=part == 0)
            self.last.weight = nn.Parameter(whole.weight.detach().chunk(2, 1)[part].clone())
            if part == 0:
                self.last.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.first(x)).relu())
        x = x + self.wrong if not torch.is_grad_enabled() else x
        return self.last(x if self.part is None else x.chunk(2, 1)[self.part])  # type: ignore[no-any-return]


def evaluate(model: nn.Module, times: int = 1, *, mode: bool = False, scale: float = 1.0) -> None:
    model.train(mode)
    with torch.no_grad():
        for number in range(times):
            model(batch() * scale + number)
    model.train()


def training(model: nn.Module, then: Callable[[nn.Module], None], steps: int = 1) -> Callable[[], None]:
    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            step(model, optimizer)
            then(model)

    return train


def trusted(out: Path, then: Callable[[nn.Module], None] = evaluate, steps: int = 1) -> Path:
    model = Judge()
    trace_reference(training(model, then, steps), model, out=out, samples=2, steps=steps)
    return out


def judged(out: Path, model: nn.Module, then: Callable[[nn.Module], None] = evaluate, steps: int = 1) -> Path:
    with trace(model, out, steps=steps):
        training(model, then, steps)()
    return out


def evaluated(verdict: Verdict) -> list[Any]:
    return [t for t in verdict.tensors if t.phase]


def test_an_evaluation_is_told_apart_from_training_and_agrees(tmp_path: Path) -> None:
    found = compare_to(trusted(tmp_path / "r"), judged(tmp_path / "c", Judge()))
    assert found.verdict == "equivalent", found.reason
    assert {t.name for t in evaluated(found)} == {"", "first", "norm", "drop", "last"}
    assert all(t.verdict == "ok" and t.kind in ("input", "output") for t in evaluated(found))
    record = Recording(tmp_path / "c").ranks()[0]
    assert not any(e.phase for e in record.entries) and max(e.call for e in record.entries if e.name == "first") == 0


def test_what_is_wrong_in_evaluation_only_is_named_with_module_and_phase(tmp_path: Path) -> None:
    found = compare_to(trusted(tmp_path / "r"), judged(tmp_path / "c", Judge(wrong=0.01)))
    assert found.verdict == "different" and found.first is not None and found.first.phase == "evaluation"
    assert not any(failing(t) for t in found.tensors if not t.phase)
    culprit = culprit_of(found)
    assert culprit is not None and culprit.module == "" and "in evaluation" in culprit.text and "into last" in culprit.text


def test_dropout_left_on_in_evaluation_is_found(tmp_path: Path) -> None:
    found = compare_to(trusted(tmp_path / "r"), judged(tmp_path / "c", Judge(), lambda model: evaluate(model, mode=True)))
    assert found.verdict == "different"
    assert "drop" in {t.name for t in evaluated(found) if t.kind == "dropout" and "probability 0.3" in t.note}


def test_running_statistics_that_are_wrong_show_in_the_evaluation(tmp_path: Path) -> None:
    def then(model: nn.Module) -> None:
        model.norm.running_mean += 0.1  # type: ignore[operator, union-attr]
        evaluate(model)

    found = compare_to(trusted(tmp_path / "r"), judged(tmp_path / "c", Judge(), then))
    assert found.verdict == "different"
    assert {t.name for t in evaluated(found) if failing(t)} >= {"norm"} and "first" not in {t.name for t in evaluated(found) if failing(t)}
    assert culprit_of(found) is None  # the buffer is wrong before it is evaluated with


def test_an_evaluation_that_is_dealt_out_to_ranks_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(rank: int, wrong: bool) -> Callable[[nn.Module], None]:
        def then(model: nn.Module) -> None:
            model.eval()
            with torch.no_grad():
                for number in range(rank, 6, 2):
                    model(batch() + number + (0.5 if wrong and rank else 0.0))
            model.train()

        return then

    there = trusted(tmp_path / "r", lambda model: evaluate(model, 6))
    for name, wrong in (("right", False), ("wrong", True)):

        def run(rank: int, wrong: bool = wrong) -> Any:
            model = Judge()
            return model, training(model, shares(rank, wrong))

        found = compare_to(there, record_ranks(tmp_path / name, monkeypatch, run))
        assert found.verdict == ("different" if wrong else "equivalent"), found.reason
        assert len({t.call for t in evaluated(found) if t.name == "last"}) >= 4
        assert any("2 of 6 forwards of the reference" in text for text in found.unchecked)


def test_what_one_side_does_not_evaluate_is_listed(tmp_path: Path) -> None:
    found = compare_to(trusted(tmp_path / "r", steps=2), judged(tmp_path / "c", Judge(), lambda model: None, steps=2))
    assert found.verdict == "equivalent" and not evaluated(found)
    assert "evaluation of step 1: only the reference runs forwards without gradients" in found.unchecked


def test_an_evaluation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Judge()

    def failing_evaluation(_: nn.Module) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError):
            model(torch.zeros(2, 3))

    found = compare_to(trusted(tmp_path / "r", lambda model: None, 2), judged(tmp_path / "c", model, failing_evaluation, 2))
    assert found.verdict == "equivalent", found.reason


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_an_evaluation_after_the_recorded_steps_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Steps in between are not recorded, and noise goes on through them."""
    monkeypatch.setattr("proctor.oracle.recording.tracing.CollectConfig", functools.partial(CollectConfig, until_evaluation=True))

    def loop(model: nn.Module, scale: float = 1.0) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(8):
            step(model, optimizer)
            if number == 4:
                evaluate(model)

    model = Judge()
    trace_reference(lambda: loop(model), model, out=tmp_path / "r", samples=2)
    other = Judge(wrong=wrong)
    with trace(other, tmp_path / "c"):
        loop(other)
    found = compare_to(tmp_path / "r", tmp_path / "c")
    assert found.verdict == ("different" if wrong else "equivalent"), found.reason
    assert {t.step for t in evaluated(found)} == {4} and {t.step for t in found.tensors if not t.phase} == {0}
    assert not wrong or (found.first is not None and found.first.name == "last")
