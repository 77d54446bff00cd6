"""`progress`: only what should move a parameter moves it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers.runs import write_run

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.progress import Progress
from proctor.invariants.trace import Trace

RELATION = Progress()
STEPS = 5
HELD = {"requires_grad": True, "in_optimizer": True, "optimizer": "#0"}
FROZEN = {"requires_grad": False, "in_optimizer": True, "optimizer": "#0"}
LOOSE = {"requires_grad": False, "in_optimizer": False}
UPDATE = {"fn": "torch.optim.Optimizer.step", "args": {"a": [{"O": "torch.optim.SGD", "v": "#0", "a": {}}], "k": {}}, "site": "train.py:9"}
_numbers = itertools.count()


class Job:
    """Writes one process call by call."""

    def __init__(self, **info: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self.info = info

    def call(self, fn: str, step: int) -> int:
        self.calls.append({**(UPDATE if fn == UPDATE["fn"] else {"fn": fn}), "step": step})
        return len(self.calls)

    def see(self, name: str, fp: int, step: int, meta: dict[str, Any], *, call: int = 0, edge: int = 0) -> None:
        var = {"name": name, "attr": "data", "module": "torch.nn.Linear", "kind": "weight"}
        self.states.append(
            {"var": var, "step": step, "seq": len(self.calls), "call": call, "edge": edge, "fp": fp, "meta": meta, "norm": float(fp)}
        )

    def update(self, step: int, values: dict[str, int], meta: dict[str, Any] = HELD) -> None:
        call = self.call(UPDATE["fn"], step)
        for name, fp in values.items():
            self.see(name, fp, step, meta, call=call, edge=1)

    def trace(self, folder: Path) -> Trace:
        return Trace.load([write_run(folder / f"run{next(_numbers)}", [{"calls": self.calls, "states": self.states, **self.info}])])


def plain(**info: Any) -> Job:
    job = Job(**info)
    job.see("a.weight", 1, -1, HELD)
    return job


def failing(trace: Trace, hypotheses: list[Hypothesis] | None = None) -> pl.DataFrame:
    frame = RELATION.examples(trace, hypotheses or RELATION.propose(trace)).frame
    return frame.filter(~frame["passed"].fill_null(value=True))


def between(trace: Trace) -> list[Hypothesis]:
    return [Hypothesis.of("progress", mode="between", family=trace.families["family"][0])]


def test_a_parameter_that_only_the_optimizer_moves_passes(tmp_path: Path) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
    trace = job.trace(tmp_path)
    assert {h["mode"] for h in RELATION.propose(trace)} == {"between", "trains", "undone"}
    assert failing(trace).is_empty()


def test_an_edit_between_two_updates_is_named_with_its_step(tmp_path: Path) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        if step == 2:
            job.see("a.weight", 77, step, HELD)
    trace = job.trace(tmp_path)
    bad = failing(trace, between(trace))
    assert bad.select("step", "_name").rows() == [(2, "a.weight")]
    detail = RELATION.detail(trace, between(trace)[0], bad.row(0, named=True))
    assert detail.variable == "a.weight"
    assert "after Optimizer.step of step 2" in detail.seen
    assert {h["mode"] for h in RELATION.propose(trace)} == {"trains", "undone"}  # a program that does so teaches no rule on edits


def test_values_swapped_in_and_back_are_fine(tmp_path: Path) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        job.see("a.weight", 500, step, HELD)
        job.see("a.weight", 10 + step, step, HELD)
    trace = job.trace(tmp_path)
    assert failing(trace, between(trace)).is_empty()


def test_a_load_is_no_edit_and_neither_is_what_follows_the_last_update(tmp_path: Path) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        if step == 2:
            call = job.call("torch.nn.Module.load_state_dict", step)
            job.see("a.weight", 3, step, HELD, call=call, edge=1)
    job.see("a.weight", 99, STEPS - 1, HELD)
    trace = job.trace(tmp_path)
    assert failing(trace, between(trace)).is_empty()


def test_what_no_optimizer_holds_may_be_written(tmp_path: Path) -> None:
    job = plain()
    job.see("teacher.weight", 5, -1, LOOSE)
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        job.see("teacher.weight", 50 + step, step, LOOSE)
    assert failing(job.trace(tmp_path)).is_empty()


def test_a_frozen_parameter_that_its_optimizer_moves_fails(tmp_path: Path) -> None:
    job = plain()
    job.see("b.weight", 4, -1, FROZEN)
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
    healthy = job.trace(tmp_path)
    assert {h["mode"] for h in RELATION.propose(healthy)} == {"between", "frozen", "trains", "undone"}
    job.update(STEPS, {"b.weight": 6}, FROZEN)
    bad = failing(job.trace(tmp_path), [Hypothesis.of("progress", mode="frozen")])
    assert bad.select("step", "_name").rows() == [(STEPS, "b.weight")]


def test_lost_records_make_an_edit_unknown(tmp_path: Path) -> None:
    job = plain(dropped=4)
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        job.see("a.weight", 70 + step, step, HELD)
    trace = job.trace(tmp_path)
    frame = RELATION.examples(trace, between(trace)).frame
    assert frame["passed"].null_count() == frame.height > 0


@pytest.mark.parametrize("clips", [False, True])
def test_an_evaluation_leaves_parameters_alone_in_any_program(tmp_path: Path, clips: bool) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        if step % 2:
            job.calls.append({"fn": "lib.Net.forward", "step": step, "phase": "eval"})
        if step == 3 or (clips and step < 3):
            job.see("a.weight", 77 + step, step, HELD)
    hypothesis = Hypothesis.of("progress", mode="evaluation")
    trace = job.trace(tmp_path)
    assert failing(trace, [hypothesis])["step"].to_list() == ([] if clips else [3])
    assert RELATION.say(hypothesis).startswith("an evaluation leaves")


@pytest.mark.parametrize("past", [None, False, True])
def test_an_evaluation_is_told_from_what_is_written_with_each_update(tmp_path: Path, past: bool | None) -> None:
    """Where each turn has an evaluation, steps that are gone say whether parameters are written without one."""
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        job.calls.append({"fn": "lib.Net.forward", "step": step, "phase": "eval"})
        job.see("a.weight", 77 + step, step, HELD)
    trace = job.trace(tmp_path)
    if past is not None:
        trace.past["progress"] = pl.DataFrame({"proc": [0], "_wrote": [past]}, schema={"proc": pl.UInt16, "_wrote": pl.Boolean})
    rows = RELATION.examples(trace, [Hypothesis.of("progress", mode="evaluation")]).frame
    assert rows["passed"].to_list() == {None: [None] * 4, False: [False] * 4, True: []}[past]
    plainly = plain()
    for step in range(STEPS):
        plainly.update(step, {"a.weight": 10 + step})
    assert RELATION.remember(plainly.trace(tmp_path), 0, STEPS).rows() == [(0, False)]


@pytest.mark.parametrize(("norm", "passed"), [(13.000001, None), (13.1, False)])
def test_averaged_weights_that_come_back_but_for_rounding_are_undecided(tmp_path: Path, norm: float, passed: bool | None) -> None:
    job = plain()
    for step in range(STEPS):
        job.update(step, {"a.weight": 10 + step})
        if step == 3:
            job.calls.append({"fn": "lib.Net.forward", "step": step, "phase": "eval"})
            job.see("a.weight", 77, step, HELD)
            job.states[-1]["norm"] = norm
    rows = RELATION.examples(job.trace(tmp_path), [Hypothesis.of("progress", mode="evaluation")]).frame
    assert rows.filter(pl.col("step") == 3)["passed"].to_list() == [passed]


def test_a_parameter_of_the_learned_kind_that_does_not_move_fails_whatever_the_depth(tmp_path: Path) -> None:
    def job(rests: str, *layers: str) -> Trace:
        job = Job()
        for name in layers:
            job.see(name, 1, -1, HELD)
        for step in range(STEPS):
            job.update(step, {name: 10 + step for name in layers if name != rests})
        return job.trace(tmp_path)

    trains = [h for h in RELATION.propose(job("", "a.0.weight", "a.1.weight")) if h["mode"] == "trains"]
    assert len(trains) == 1
    assert failing(job("", "a.0.weight", "a.1.weight", "a.2.weight"), trains).is_empty()
    bad = failing(job("a.2.weight", "a.0.weight", "a.1.weight", "a.2.weight"), trains)
    assert bad.select("step", "_name").rows() == [(1, "a.2.weight")]
    known = [h for h in RELATION.propose(job("b.weight", "a.0.weight", "b.weight")) if h["mode"] == "trains"]
    assert failing(job("b.weight", "a.0.weight", "b.weight"), known).is_empty()  # it did not train in the learned run


@pytest.mark.parametrize(("second", "passed"), [(2.0, False), (1.9, True), (1.0, True)])
def test_a_backward_that_doubles_all_gradients_fails(tmp_path: Path, second: float, passed: bool) -> None:
    job = plain()
    grad = {"name": "a.weight", "attr": "grad", "module": "torch.nn.Linear", "kind": "weight"}
    for step in range(STEPS):
        for nth, norm in enumerate((0.7, 0.7 * second)):
            call = job.call("torch.Tensor.backward", step)
            job.states.append({"var": grad, "step": step, "seq": call, "call": call, "edge": 1, "fp": 100 * step + nth + 1, "meta": HELD, "norm": norm})
        job.update(step, {"a.weight": 10 + step})
    rows = RELATION.examples(job.trace(tmp_path), [Hypothesis.of("progress", mode="counted")]).frame
    assert rows["passed"].to_list().count(False) == (0 if passed else STEPS)


@pytest.mark.parametrize(
    ("forgets", "growth", "passed"), [(True, 0.3, [False] * (STEPS - 1)), (False, 0.3, [True] * (STEPS - 1)), (False, 1e7, []), (True, 1e7, [])]
)
def test_an_average_that_is_a_fixed_share_of_each_gradient_fails(tmp_path: Path, forgets: bool, growth: float, passed: list[bool]) -> None:
    """Behind a gradient that is millions of times the one before, an average that remembers is the same share of it, too."""
    job = plain()
    average, size = 0.0, 1.0
    for step in range(STEPS):
        size = 1.0 + growth * step if growth < 1 else size * growth
        average = (0.0 if forgets else 0.9 * average) + 0.1 * size
        call = job.call("torch.Tensor.backward", step)
        var = {"name": "a.weight", "attr": "grad", "module": "torch.nn.Linear", "kind": "weight"}
        job.states.append({"var": var, "step": step, "seq": call, "call": call, "edge": 1, "fp": step + 1, "meta": HELD, "norm": size})
        job.update(step, {"a.weight": 10 + step})
        state = {"name": "a.weight", "attr": "exp_avg", "module": "", "kind": "", "role": "optimizer", "model": ""}
        job.states.append({"var": state, "step": step, "seq": len(job.calls), "call": len(job.calls), "edge": 1, "fp": step + 50, "meta": {}, "norm": average})
    rows = RELATION.examples(job.trace(tmp_path), [Hypothesis.of("progress", mode="remembers")]).frame
    assert rows["passed"].to_list() == passed
