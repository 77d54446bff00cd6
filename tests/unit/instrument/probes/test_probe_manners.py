"""Arguments that come again: large ones are known by some of their elements, and numbers that are drawn have no course."""

from __future__ import annotations

import pytest
import torch

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes._repeats import ANOTHER, ONWARD, Numbers, Repeats
from proctor.instrument.probes.manners import Manners
from proctor.native import Recorder


class Net(torch.nn.Module):
    """Takes a graph, and the same with its rows in another order."""


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_large_argument_is_another_in_each_call_or_is_not(monkeypatch: pytest.MonkeyPatch, shuffled: bool) -> None:
    sink, said = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True), set()
    monkeypatch.setattr(sink, "number", lambda name, *_, facts, **__: said.add((name.rpartition(" ")[2], facts["has"], facts["lacks"])))
    probe, graph, empty = Manners(sink), torch.randn(1, 600, 200), torch.zeros(600, 200)
    order = torch.randperm(600)
    for _ in range(12):
        order = torch.randperm(600) if shuffled else order
        probe._model_begins((Net(), graph, graph[:, order], empty), None)
    assert said == {("0", "", ANOTHER), ("1", ANOTHER, "") if shuffled else ("1", "", ANOTHER)}


def test_an_argument_that_came_again_now_and_then_is_left_open() -> None:
    def told(prints: list[int]) -> set[tuple[str, str, str]]:
        repeats, x = Repeats(), torch.rand(4)
        return {said[1:] for fp in prints for said in repeats.told("f", [("x", x, fp)], 10)}

    assert told(list(range(12))) == {(ANOTHER, "", "")}
    assert told([0] * 12) == {("", ANOTHER, "")}
    assert told([0, 0, *range(10)]) == {("", "", ANOTHER)}


def _course(values: list[float]) -> list[tuple[str, str]]:
    numbers = Numbers()
    return [said[1:] for value in values for said in numbers.told("f", ["weight"], (value,), None) if ONWARD in said]


def test_a_number_that_is_drawn_out_of_a_few_has_no_course() -> None:
    drawn = [3.0, 5.0, 2.0, 4.0, 3.0, 2.0, 6.0, 4.0, 5.0, 3.0, 6.0, 2.0, 3.0, 5.0, 3.0, 5.0, 2.0, 4.0, 2.0, 6.0, 3.0, 5.0, 2.0, 4.0]
    assert _course(drawn * 2) == []


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_a_number_that_is_annealed_anew_in_each_epoch_is_told(length: int) -> None:
    said = _course([0.1 * (i % length) for i in range(32)])
    assert said and set(said) == {("", ONWARD)}
    assert set(_course([0.1 * i for i in range(32)])) == {(ONWARD, "")}
