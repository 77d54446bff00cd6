"""Arguments of a model that are too large to be read are known by some of their elements."""

from __future__ import annotations

import pytest
import torch

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink
from proctor.instrument.probes._repeats import ANOTHER
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
