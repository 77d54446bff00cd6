"""Several steps: what is recorded of each, how many a verdict speaks of, and the step in which runs part, recorded again in full."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import compare_to  # noqa: E402
from helpers.small_net import Net, reference, step  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.verdicts import failing  # noqa: E402
from proctor.oracle.recording.outcome import Compared, departs, looked_again  # noqa: E402
from proctor.oracle.report import Report  # noqa: E402
from proctor.oracle.store import Recording, write_json  # noqa: E402


def late(out: Path, begins: int, steps: int = 4) -> Path:
    """A candidate whose loss is doubled from a step on."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with trace(net, out, steps=steps):
        for number in range(steps):
            step(net, optimizer, 2.0 if number >= begins else 1.0)
    return out


def in_full(out: Path, steps: list[int]) -> Path:
    info = Recording(out).info
    info.whole = steps
    write_json(out / "oracle.json", info)
    return out


def test_a_fault_that_begins_late_is_found_in_its_step_without_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.oracle.recording.tracing.CollectConfig", functools.partial(CollectConfig, whole=(0,)))
    trusted = in_full(reference(tmp_path / "r", steps=4), [0])
    kinds = {(e.step, e.kind) for e in Recording(trusted).ranks()[0].entries}
    assert (0, "output") in kinds and (3, "main_grad") in kinds and (3, "param_after") in kinds
    assert not any(k in ("input", "output", "grad_output", "opt_state") for s, k in kinds if s)
    right = compare_to(trusted, in_full(late(tmp_path / "right", 9), [0]))
    assert (right.verdict, right.steps) == ("equivalent", (4, 4)), right.reason
    assert "4 of 4 recorded steps compared" in right.reason and any("activations" in text for text in right.unchecked)
    comparison = Comparison(Recording(trusted), Recording(in_full(late(tmp_path / "wrong", 2), [0])))
    wrong = comparison.run()
    assert wrong.verdict == "different" and min(t.step for t in wrong.tensors if failing(t)) == 2
    assert departs(Compared(Report(wrong), comparison)) == 2
    asked: list[int] = []

    def compare(number: int) -> Compared:
        asked.append(number)
        return Compared(Report(wrong), comparison)

    again = looked_again(Compared(Report(wrong), comparison), compare)
    assert asked == [2] and "part in step 2" in again.report.verdict.notes[0]
    comparison.candidate.info.whole = [0, 2]
    assert departs(Compared(Report(wrong), comparison)) is None


def test_a_verdict_of_one_step_says_that_it_is_one(tmp_path: Path) -> None:
    found = compare_to(reference(tmp_path / "r"), late(tmp_path / "c", 9, 1))
    assert found.steps == (1, 1) and "the first step compared, later ones were not looked at" in found.reason


def test_a_second_update_with_the_same_gradients_is_no_step_of_its_own(tmp_path: Path) -> None:
    """It comes after the first step, so no tensor of that step shows it."""

    def twice(out: Path, updates: int) -> Path:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with trace(net, out, steps=1):
            for _ in range(2):
                step(net, optimizer)
                for _ in range(updates - 1):
                    optimizer.step()
        return out

    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [len(h) for h in hooks]
    trusted = reference(tmp_path / "r")
    assert compare_to(trusted, twice(tmp_path / "once", 1)).verdict == "equivalent"
    found = compare_to(trusted, twice(tmp_path / "twice", 2))
    assert found.verdict == "different" and found.first is not None and "once more with the same gradients" in found.first.note
    assert [len(h) for h in hooks] == before, "the recording ended within a hook, and took it off later"


def test_an_update_that_asks_for_its_loss_is_no_second_one(tmp_path: Path) -> None:
    """What trains does so within the update, as Lightning's loop has it: nothing has trained since the update before when it begins."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inner = SimpleNamespace(zero_grad=optimizer.zero_grad, step=lambda: None)
    with trace(net, tmp_path / "asks", steps=1):
        for _ in range(2):
            optimizer.step(lambda: step(net, inner))
    assert compare_to(reference(tmp_path / "r"), tmp_path / "asks").verdict == "equivalent"


class Cut(torch.nn.Module):
    """Two layers with dropout between them; a rank has half of what is between."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 4, bias=False)]
        self.first, self.last, self.drop = *whole, torch.nn.Dropout(0.5)
        if rank is not None:
            self.first.weight = torch.nn.Parameter(whole[0].weight.detach().chunk(2)[rank].clone())
            self.last.weight = torch.nn.Parameter(whole[1].weight.detach().chunk(2, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(x)))


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_drop_the_same_elements_of_different_features_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    from helpers.oracle.oracle_ranks import record_ranks

    from proctor.oracle import trace_reference

    def train(model: Any, seed: int) -> None:
        torch.manual_seed(seed)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    whole = Cut(None)
    trace_reference(lambda: train(whole, 1), whole, out=tmp_path / "r", samples=2)

    def run(rank: int) -> Any:
        model = Cut(rank)
        return model, lambda: train(model, 1 if alike else 1 + rank)

    found = compare_to(tmp_path / "r", record_ranks(tmp_path / "c", monkeypatch, run))
    wrong = [t for t in found.tensors if t.kind == "dropout" and failing(t)]
    assert [t.name for t in wrong] == (["drop"] if alike else [])
