"""Which steps stay in memory, how often their state is copied, and what is written when it is asked for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
import torch

from proctor.instrument.capsules import ring as capsules
from proctor.instrument.capsules import writer as _capsule_writer
from proctor.instrument.capsules.ring import Capsules
from proctor.instrument.capsules.writer import Facts
from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.observe.state import StateTracker
from proctor.instrument.steps.clock import StepClock
from proctor.instrument.steps.turns import Turns
from proctor.invariants.capsule import capsules_of, read_capsule


class Job:
    """A training loop that tells its capsules by hand what taps would."""

    def __init__(self, run: Path, **config: Any) -> None:
        self.config = RecordConfig(run=str(run), **{"capsules": 2, "capsule_values": "always", **config})
        self.run, self.guard, self.clock = run, Guard(), StepClock()
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.tracker = tracker = StateTracker(lambda kind, text: hash((kind, text)) & 0xFFFF, self.config.watches)
        tracker.add_optimizer(self.optimizer, "#0")
        facts = Facts("train.py", ("python", "train.py"), "/", {}, 0, 1, {}, {"torch": "2"}, ())
        self.kept = Capsules(self.config, tracker, self.clock, self.guard, lambda: True, lambda: facts, Turns(lambda: None).gradients)
        self.clock.on_change = self.kept.clock_moved
        self.clock.optimizer_created(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.zero_grad(1)
            x = torch.ones(4, 3)
            self.clock.forward(True)
            self.kept.model_begins((self.model, x), None)
            loss = self.model(x).square().sum()
            self.kept.model_ends((self.model, x), None, loss, False)
            self.kept.backward_begins((loss,))
            loss.backward()
            self.optimizer.step()
            self.kept.update_ends()
            self.clock.update_ends(1)
            self.optimizer.zero_grad()

    def written(self) -> list[tuple[int, int | None]]:
        return [(c.step, c.control) for c in map(read_capsule, capsules_of(self.run))]

    def wait_for(self, count: int) -> list[tuple[int, int | None]]:
        until = time.monotonic() + 10
        while len(capsules_of(self.run)) < count and time.monotonic() < until:
            time.sleep(0.01)
        return self.written()


@pytest.fixture
def _no_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsules, "HORIZON_S", 0.0)


def ring(job: Job) -> list[int]:
    return [step.step for step in job.kept.ring]


@pytest.mark.usefixtures("_no_horizon")
def test_as_many_steps_stay_as_were_asked_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(6)
    assert ring(job) == [3, 4] and job.kept.current is not None and job.kept.current.step == 5


def test_more_stay_while_they_are_young_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.steps(6)
    assert ring(job) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(capsules, "MAX_RING", 3)
    job.steps(1)
    assert ring(job) == [3, 4, 5]
    tight = Job(tmp_path, capsule_budget=2000)
    tight.steps(12)
    assert sum(step.nbytes for step in tight.kept.ring) <= 2000 or len(tight.kept.ring) == 2


@pytest.mark.usefixtures("_no_horizon")
def test_memory_of_a_step_that_left_is_used_again_unless_it_is_frozen(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(4)
    before = {id(step.values) for step in job.kept.ring}
    memory = [step.values._copies[0].data_ptr() for step in job.kept.ring if step.values is not None]
    job.kept.ring[0].frozen = True
    job.steps(4)
    assert not before & {id(step.values) for step in job.kept.ring}
    later = [step.values._copies[0].data_ptr() for step in job.kept.ring if step.values is not None]
    assert memory[0] not in later


def test_a_costly_state_is_copied_at_every_nth_step(tmp_path: Path) -> None:
    job = Job(tmp_path, capsule_values="auto")
    kept = job.kept
    kept.pace._period = 1.0
    for bare, whole, interval in ((0.0, 0.009, 1), (0.0, 0.03, 4), (0.006, 0.03, 8), (0.006, 0.009, 1), (0.5, 0.509, 4)):
        kept.pace.bare, kept.pace.whole = bare, whole
        kept.pace._adapt()
        assert kept.pace.interval == interval


def test_what_took_long_once_is_not_held_against_the_copies(tmp_path: Path) -> None:
    job = Job(tmp_path, capsule_values="auto")
    pace = job.kept.pace
    pace._adapt = lambda: None  # type: ignore[method-assign]  # each step has values, however slow this machine is
    job.steps(1)
    pace.spent = 900.0  # of the first step, which imports
    job.steps(3)
    assert 0 < pace.whole < 100
    pace.spent = 900.0
    job.steps(1)
    assert pace.whole > 200
    job.steps(2)
    assert pace.whole < 100


def test_optimizers_that_no_pack_asks_for_are_looked_at_where_their_state_is_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, capsules=4, capsule_values="auto", states=frozenset({"data"}))
    job.kept.pace._adapt = lambda: None  # type: ignore[method-assign]
    job.steps(3)
    job.kept.pace.interval = 1 << 10  # the next ones have no values
    job.steps(2)
    whole, bare = job.kept.ring[1], job.kept.ring[-1]
    assert whole.values is not None and bare.values is None
    assert whole.after is not None and bare.before is not None and bare.after is not None
    slots, prints = whole.after.by_role()["optimizer"]
    assert len(slots) == 2 and all(seen is not None for seen in prints)
    assert bare.before.by_role()["optimizer"] == bare.after.by_role()["optimizer"] == ([], [])
    assert not job.tracker.rows


def test_another_thread_asks_and_a_control_is_written_beside(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(5)
    asking = threading.Thread(target=job.kept.freeze, args=("key", 3))
    asking.start()
    asking.join()
    assert job.wait_for(2) == [(2, 3), (3, None)]
    assert not job.guard.notes


def test_the_first_step_has_its_control_after_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(1)
    job.kept.freeze("key", 0)
    job.steps(3)
    assert job.wait_for(2) == [(0, None), (1, 0)]


def test_a_step_without_values_is_followed_by_one_that_has_them(tmp_path: Path) -> None:
    job = Job(tmp_path, capsule_values="auto")
    job.kept.pace._adapt = lambda: setattr(job.kept.pace, "interval", 4)  # type: ignore[method-assign]
    job.steps(6)
    job.kept.freeze("key", 5)
    job.steps(5)
    assert job.wait_for(3) == [(4, 8), (5, None), (8, None)]


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_results_are_left_out_of_steps_whose_values_cost_too_much(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, capsules=8, capsule_values=mode)
    job.kept.pace._adapt = lambda: None  # type: ignore[method-assign]
    job.kept.pace.interval = 4
    job.steps(6)
    steps = list(job.kept.ring)
    assert [step.values is not None for step in steps] == [mode == "auto" and step.step % 4 == 0 for step in steps]
    for step in steps:
        gave = [bool(call.outputs) for call in step.calls]
        assert len(gave) > 1 and gave == [mode == "never" or step.step % 4 == 0] * len(gave)
        assert all(call.inputs for call in step.calls if call.what != "backward")


@pytest.mark.usefixtures("_no_horizon")
def test_what_comes_too_late_is_said_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(8)
    job.kept.freeze("a", 0)
    job.kept.freeze("b", 1)
    job.kept.close()
    assert [note for note in job.kept.notes if "too late" in note] == job.kept.notes and len(job.kept.notes) == 1
    assert job.written() == []


def test_a_step_that_runs_is_written_when_the_program_ends(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.steps(3)
    job.kept.freeze("key", 2)
    job.kept.close()
    assert job.written() == [(1, 2), (2, None)]


def test_a_full_disk_is_said_once_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_capsule_writer, "write_capsule", full)
    job = Job(tmp_path)
    job.steps(4)
    job.kept.freeze("a", 1)
    job.kept.freeze("b", 2)
    job.kept.close()
    assert len(job.kept.notes) == 1 and "No space left" in job.kept.notes[0]
    assert not job.guard.notes


def test_one_key_does_not_fill_the_disk(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for step in range(10):
        job.steps(1)
        job.kept.freeze("key", step)
    job.kept.close()
    assert len([c for _, c in job.written() if c is None]) <= _capsule_writer.MAX_A_KEY


def test_no_graph_outlives_its_step(tmp_path: Path) -> None:
    import gc
    import weakref

    job = Job(tmp_path)
    x = torch.ones(4, 3)
    job.clock.zero_grad(1)
    job.kept.model_begins((job.model, x), None)
    out = job.model(x)
    job.kept.model_ends((job.model, x), None, out, False)
    gone = weakref.ref(out), weakref.ref(x)
    del out, x
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
