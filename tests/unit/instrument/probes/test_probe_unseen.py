"""Samples that a model was trained on: a batch that brings nothing new, as a whole graph in each step, is not read for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Sink, unseen
from proctor.instrument.probes.unseen import NOT_TRAINED, Unseen
from proctor.native import Recorder


class Seen:
    """A probe, how many batches it read, and what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        self.said: list[tuple[str, str]] = []
        sink = Sink(Recorder(), lambda: 0, RecordConfig(run=""), lambda: True)
        monkeypatch.setattr(sink, "number", self._number)
        self._samples = unseen._samples
        monkeypatch.setattr(unseen, "_samples", self._counted)
        self.probe, self.model = Unseen(sink), torch.nn.Linear(8, 2)

    def _number(self, *_: Any, facts: dict[str, str], **__: Any) -> None:
        if facts["mode"] == "unseen":
            self.said.append((facts["has"], facts["lacks"]))

    def _counted(self, values: Any) -> set[int]:
        self.read += 1
        return self._samples(values)

    def train(self, x: torch.Tensor) -> None:
        """A call of the training."""
        self.model.train()
        self.probe._called((self.model, x), None)

    def evaluate(self, x: torch.Tensor) -> None:
        """A call of an evaluation."""
        self.model.eval()
        with torch.no_grad():
            self.probe._called((self.model, x), None)


def test_batches_that_bring_nothing_new_are_read_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, graph = Seen(monkeypatch), torch.randn(2_708, 8)
    for _ in range(40):
        seen.train(graph)
    begun = seen.read
    for _ in range(640):
        seen.train(graph)
    assert begun < 25 and 1 <= seen.read - begun <= 4, "64 are passed, then 128, then 256"
    seen.evaluate(graph[:64])
    assert seen.said == [("", NOT_TRAINED)], "all of them are known"
    seen.evaluate(torch.randn(64, 8))
    assert len(seen.said) == 1, "some of what was trained on may not have been read"


def test_as_long_as_batches_bring_new_samples_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    for _ in range(600):
        seen.train(torch.randn(16, 8))
    assert seen.read == 600
    seen.evaluate(torch.randn(64, 8))
    assert seen.said == [(NOT_TRAINED, "")]


def test_samples_that_come_after_a_rest_are_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, known = Seen(monkeypatch), torch.randn(2_708, 8)
    for _ in range(400):
        seen.train(known)
    for _ in range(70):
        seen.train(more := torch.randn(512, 8))
    before = seen.read
    seen.train(more)
    assert seen.read == before + 1, "each batch is read again"
