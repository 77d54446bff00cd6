"""A model that is called thousands of times a step (by a solver, by a policy that acts) is looked at in the first of its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Hooks, Sink, _looks
from proctor.instrument.probes import beside as probe_beside
from proctor.instrument.probes.beside import Beside
from proctor.instrument.probes.operations import Operations
from proctor.invariants.schema import MODEL_CALL
from proctor.native import Recorder


def sink(live: bool = True) -> Sink:
    return Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: live)


def told(calls: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What four steps say of a model that trains and of a frozen one beside it, which is given the same."""
    said: set[str] = set()
    place = sink()

    def number(_: str, value: float, *, facts: dict[str, str], **__: Any) -> None:
        said.add(facts["has"])

    monkeypatch.setattr(place, "number", number)
    probe = Beside(place)
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    for step in range(1, 9):
        x = torch.full((3, 2), float(step))
        for _ in range(calls):
            probe._called((trained, x), None)
            probe._called((frozen, x), None)
        probe.step_begins(step)
    return said


def test_of_so_many_calls_that_not_all_inputs_are_read_nothing_is_said_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    same = probe_beside._INPUTS[True]
    few, many = told(2, monkeypatch), told(probe_beside._READ, monkeypatch)
    assert same in few and same not in many
    assert probe_beside.ANOTHER in many and few - {same} == many


def test_a_look_that_has_seen_its_most_is_taken_off_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_looks, "_OPERATIONS", 3)
    probe, model, x = Operations(sink()), torch.nn.Linear(2, 2), torch.ones(2, 2)
    hooks: Hooks = probe.hooks(MODEL_CALL, Home.TORCH)
    begins = hooks[0]
    assert begins is not None
    for step in range(1, 7):
        probe.step_begins(step)
    assert probe._look is not None
    try:
        for _ in range(5):
            begins((model, x), None)
            torch.relu(x).sin().cos()
        begins((model, x), None)
        assert probe._look is None or probe._look.whole
    finally:
        probe.closing()
    assert torch.overrides._get_current_function_mode() is None
