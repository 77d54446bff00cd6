"""The batches probe: which calls are looked at, and what of their arguments."""

from __future__ import annotations

from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import NO_HOOKS, Home, Sink
from proctor.invariants.schema import Name, Value
from proctor.native import Recorder

torch = pytest.importorskip("torch")

from proctor.instrument.probes import batches  # noqa: E402  torch first
from proctor.instrument.probes.batches import MODEL_CALL, Batches  # noqa: E402

nn = torch.nn


class Watch:
    def __init__(self) -> None:
        self.recorder = Recorder()
        self.sink = Sink(self.recorder, lambda: 0, RecordConfig(run="run"), lambda: True)
        self.probe = Batches(self.sink)
        before, _ = self.probe.hooks(MODEL_CALL, Home.TORCH)
        assert before is not None
        self.before = before

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> list[tuple[str, int]]:
        self.before((module, *args), kwargs or None)
        texts = {code: text for kind, code, text in self.recorder.drain_names() if kind == int(Name.PLACE)}
        self.places = {**getattr(self, "places", {}), **texts}
        return [(self.places[r[3]], r[6]) for r in self.sink.take_rows() if r[2] == int(Value.BATCH)]


def test_tensors_inside_containers_are_found_and_hashed() -> None:
    watch, model = Watch(), nn.Linear(2, 2)
    x, y = torch.ones(4, 2), torch.arange(3)
    rows = watch.rows(model, {"ids": x, "more": [y, "text"]}, mask=x)
    assert [place for place, _ in rows] == ["0['ids']", "0['more'][0]", "mask"]
    assert rows[0][1] == rows[2][1] != rows[1][1]
    assert watch.rows(model, x) == [("0", rows[0][1])]


def test_evaluation_says_nothing() -> None:
    watch, model = Watch(), nn.Linear(2, 2)
    with torch.no_grad():
        assert watch.rows(model, torch.ones(1, 2)) == []
    assert watch.rows(model.eval(), torch.ones(1, 2)) == []


def test_what_has_no_dense_content_is_passed_over() -> None:
    watch, model = Watch(), nn.Linear(2, 2)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2), check_invariants=True)
    assert [p for p, _ in watch.rows(model, sparse, torch.empty(0), torch.ones(2))] == ["2"]


def test_other_functions_are_left_alone() -> None:
    assert Batches(Watch().sink).hooks("torch.save", Home.TORCH) == NO_HOOKS


def test_a_large_batch_is_hashed_again_only_when_it_may_have_changed() -> None:
    watch, model = Watch(), nn.Linear(2, 2)
    x = torch.zeros(1 << 19)
    first = watch.rows(model, x)
    assert watch.rows(model, x) == first
    x[300_000] = 1.0  # bumps the version, far from where it is looked at
    second = watch.rows(model, x)
    assert second != first
    x.numpy()[0] = 1.0  # bumps nothing
    assert watch.rows(model, x) != second
    assert watch.rows(model, torch.zeros(1 << 19)) == first, "another tensor of the same content"


def test_of_a_model_that_is_called_hundreds_of_times_between_two_backwards_the_first_calls_are_told() -> None:
    watch, model, x = Watch(), nn.Linear(2, 2), torch.ones(4, 2)
    assert sum(len(watch.rows(model, x)) for _ in range(200)) == batches._FORWARDS
    propagates, _ = watch.probe.hooks("torch.autograd.backward", Home.TORCH)
    assert propagates is not None
    propagates((), None)
    assert len(watch.rows(model, x)) == 1
    for _ in range(200):
        watch.rows(model, x)
    watch.probe.step_begins(1)
    assert len(watch.rows(model, x)) == 1


def test_one_large_batch_in_each_step_is_looked_at_in_one_of_eight_until_another_one_comes() -> None:
    watch, model = Watch(), nn.Linear(2, 2)
    x, y = torch.zeros(batches._LARGE // 4), torch.ones(batches._LARGE // 4)

    def rows(given: Any) -> int:
        watch.probe.step_begins(1)
        return len(watch.rows(model, given))

    assert sum(rows(x) for _ in range(batches._STILL + 1)) == batches._STILL + 1
    assert sum(rows(x) for _ in range(80)) == 80 // batches._EVERY
    assert rows(y) == rows(x) == 1, "another object"
    for _ in range(2 * batches._STILL):
        rows(x)
    x.add_(1)
    assert rows(x) == 1, "another version"
    small = torch.ones(4, 2)
    assert sum(rows(small) for _ in range(200)) == 200, "hashed at once"
