"""The randomness probe: states are read and not drawn from; loaders, workers and draws are told apart."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.probes import Home, Sink, _generators
from proctor.invariants.schema import Name, Value
from proctor.native import Recorder

torch = pytest.importorskip("torch")

from proctor.instrument.probes import _workers  # noqa: E402  torch first
from proctor.instrument.probes.randomness import ITER, MODEL_CALL, NEXT, Randomness  # noqa: E402

nn = torch.nn
data = torch.utils.data


class Watch:
    """A probe whose hooks the test calls where taps would."""

    def __init__(self, run: str = "run") -> None:
        self.recorder = Recorder()
        self.sink = Sink(self.recorder, lambda: 0, RecordConfig(run=run), lambda: True)
        self.probe = Randomness(self.sink)
        self.model = nn.Linear(2, 2)
        self.texts: dict[int, str] = {}

    def around(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        before, after = self.probe.hooks(name, Home.TORCH)
        if before is not None:
            before(args, kwargs or None)
        result = function(*args, **kwargs)
        if after is not None:
            after(args, kwargs or None, result, False)
        return result

    def forward(self, draw: bool = False) -> None:
        self.around(MODEL_CALL, lambda _: torch.rand(1) if draw else None, self.model)

    def epoch(self, loader: Any) -> None:
        iterator = self.around(ITER, type(loader).__iter__, loader)
        for _ in range(len(loader)):
            self.around(NEXT, next, iterator)
            self.forward()

    def rows(self, kind: Value = Value.RNG) -> list[tuple[str, int, int]]:
        """Place, item and state."""
        self.texts |= {code: text for k, code, text in self.recorder.drain_names() if k == int(Name.PLACE)}
        return [(self.texts[r[3]], r[4], r[6]) for r in self.sink.take_rows() if r[2] == int(kind)]


class Noisy(data.Dataset):  # type: ignore[type-arg,misc,name-defined]
    def __init__(self, seed: int = 0) -> None:
        self.transforms = [SimpleNamespace(rng=np.random.default_rng(seed))]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i + self.transforms[0].rng.random())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
        lambda: random.Random(3),
    ],
)
def test_a_digest_is_of_the_state_and_leaves_it_alone(make: Any) -> None:
    one, two = make(), make()
    assert _generators.digest(one) == _generators.digest(two) == _generators.digest(one) is not None
    getattr(two, "random", getattr(two, "random_sample", None) or (lambda: torch.rand(1, generator=two)))()
    assert _generators.digest(one) != _generators.digest(two)


def test_reading_draws_nothing() -> None:
    def state() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    watch, before = Watch(), state()
    watch.forward()
    watch.probe.step_begins(1)
    watch.probe.step_begins(2)
    assert state() == before


def test_generators_of_a_dataset_are_found_in_its_transforms() -> None:
    found = dict(_generators.held("dataset", Noisy()))
    assert list(found) == ["dataset.transforms[0].rng"]


def test_a_forward_that_draws_from_the_state_of_the_last_one_is_told() -> None:
    watch = Watch()
    torch.manual_seed(0)
    watch.forward()
    watch.forward()
    assert [place for place, _, _ in watch.rows()] == ["forward torch"] * 2
    for _ in range(2):
        torch.manual_seed(1)
        watch.forward(draw=True)
    assert [place for place, _, _ in watch.rows()] == ["forward torch", "forward end torch"] * 2


def test_after_the_first_forwards_the_end_is_looked_at_only_where_the_beginning_repeats() -> None:
    watch = Watch()
    for seed in range(4):
        torch.manual_seed(seed)
        watch.forward(draw=True)
    watch.rows()
    for seed in (4, 5, 5):
        torch.manual_seed(seed)
        watch.forward(draw=True)
    assert [place for place, _, _ in watch.rows()] == ["forward torch"] * 3 + ["forward end torch"]


def test_only_generators_that_move_leave_rows_at_steps() -> None:
    watch = Watch()
    watch.probe.step_begins(1)
    torch.rand(1)
    watch.probe.step_begins(2)
    watch.probe.step_begins(3)
    (_, _, one), (_, _, two) = watch.rows()
    assert one == two == _generators.digest(torch.default_generator)


def test_epochs_and_loads_of_a_training_loader() -> None:
    watch = Watch()
    loader = data.DataLoader(Noisy(), batch_size=2, shuffle=True)
    for _ in range(2):
        watch.epoch(loader)
    rows = watch.rows()
    epochs = [state for place, _, state in rows if place == "epoch RandomSampler"]
    loads = [state for place, _, state in rows if place == "load dataset.transforms[0].rng"]
    assert len(set(epochs)) == 2
    assert len(set(loads)) == len(loads) >= 4


def test_loaders_for_evaluation_are_no_epochs() -> None:
    watch = Watch()
    watch.model.eval()
    watch.epoch(data.DataLoader(Noisy(), batch_size=2, shuffle=True))
    assert watch.rows() == []


def test_an_order_that_is_not_shuffled_is_none() -> None:
    sampler = data.DistributedSampler(Noisy(), num_replicas=2, rank=0, shuffle=False)
    watch = Watch()
    watch.epoch(data.DataLoader(Noisy(), batch_size=2, sampler=sampler))
    watch.epoch(data.DataLoader(Noisy(), batch_size=2))
    assert not [place for place, _, _ in watch.rows() if place.startswith("epoch")]


def test_set_epoch_changes_the_order() -> None:
    sampler = data.DistributedSampler(Noisy(), num_replicas=2, rank=0)
    loader, watch = data.DataLoader(Noisy(), batch_size=2, sampler=sampler), Watch()
    states = []
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        watch.epoch(loader)
        states += [state for place, _, state in watch.rows() if place.startswith("epoch")]
    assert states[0] == states[1] != states[2]


def test_draws_are_told_by_how_they_were_made() -> None:
    watch = Watch()
    watch.around("torch.rand", torch.rand, 16)
    watch.around("torch.randn", torch.randn, 16, generator=torch.Generator())
    watch.around("torch.Tensor.normal_", torch.Tensor.normal_, torch.empty(16))
    watch.around("torch.rand", torch.rand, 3)
    assert [place for place, _, _ in watch.rows(Value.DRAW)] == ["shared", "own", "fill"]


def worker_run(tmp_path: Path) -> Path:
    folder = tmp_path / "procs" / f"0-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_report_their_generators(tmp_path: Path, method: str) -> None:
    worker_run(tmp_path)
    watch = Watch(str(tmp_path))
    loader = data.DataLoader(
        Noisy(),
        batch_size=2,
        num_workers=2,
        worker_init_fn=Observed(str(tmp_path)),
        multiprocessing_context=method,
    )
    watch.epoch(loader)
    watch.probe.step_begins(1)
    rows = [(p, item, s) for p, item, s in watch.rows() if p.endswith("rng")]
    assert sorted((p, i) for p, i, _ in rows) == [
        (f"worker {e}dataset.transforms[0].rng", i) for e in ("", "end ") for i in (0, 1)
    ]
    assert len({s for p, _, s in rows if not p.startswith("worker end")}) == 1  # both have the copy
    watch.probe.closing()
    assert not list(tmp_path.rglob("*.jsonl"))


class Observed:
    """Stands for the tap of the worker's loop, which a process without an observer does not have."""

    def __init__(self, run: str) -> None:
        self.run = run

    def __call__(self, worker: int) -> None:
        _workers.observe(self.run)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"pid": 1}',
        '{"pid": "x", "k": 1, "w": 0, "g": []}',
        '{"pid": 7, "k": 9, "w": 0, "g": 3}',
    ],
)
def test_a_damaged_report_is_passed_over(tmp_path: Path, line: str) -> None:
    folder = worker_run(tmp_path)
    good = {"pid": 7, "k": 1, "w": 0, "g": [["numpy", 1, 2]]}
    (folder / _workers.FILE).write_text(f"{line}\n{json.dumps(good)}\n")
    reports = _workers.Reports(str(tmp_path))
    reports.expect([7], 5)
    assert list(reports.take({5: True})) == [(5, 0, "numpy", 1, 2)]


def test_reports_wait_until_it_is_known_whether_their_loader_trains(tmp_path: Path) -> None:
    folder = worker_run(tmp_path)
    (folder / _workers.FILE).write_text(json.dumps({"pid": 7, "k": 1, "w": 0, "g": [["numpy", 1, 2]]}) + "\n")
    reports = _workers.Reports(str(tmp_path))
    reports.expect([7], 5)
    assert list(reports.take({})) == []
    assert len(list(reports.take({5: True}))) == 1
    assert list(reports.take({5: True})) == []
