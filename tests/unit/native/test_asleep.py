"""Steps without hooks: acts are noted in their order and told behind each update; what cannot be followed ends the sleep."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from proctor.instrument.steps import asleep
from proctor.instrument.steps.asleep import (
    BACKWARD,
    CLEAR,
    COLLECTIVE,
    FETCH,
    FORWARD,
    QUIET,
    SCALED,
    UPDATE,
    act_of,
)
from proctor.native import ACTIVE, Recorder, Tap

pytestmark = pytest.mark.skipif(ACTIVE != "native", reason="the twin has hooks only")


class Module:
    training = True


class Program:
    """Functions with taps around them, and what was told of them."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.grad = True
        self.recorder.set_probes(lambda: self.grad, None, None, ())
        self.told: list[tuple[Any, ...]] = []
        self.hooked: list[str] = []
        self.optimizer, self.module = object(), Module()

    def tap(self, act: int, body: Any = lambda *args, **kwargs: "result", kind: int = 0) -> Any:
        tap = Tap(self.recorder, body, 1, kind, lambda *args: self.hooked.append("before"), lambda *args: self.hooked.append("after"))
        tap.always, tap.act = True, act
        return tap

    def tell(self, *said: Any) -> None:
        self.told.append(said)

    def sleep(self) -> None:
        assert self.recorder.sleep(self.tell) and self.recorder.asleep


@pytest.fixture
def program() -> Program:
    return Program()


def test_acts_are_told_in_order_behind_the_update_and_no_hook_runs(program: Program) -> None:
    forward, backward, step = program.tap(FORWARD, kind=2), program.tap(BACKWARD), program.tap(UPDATE)
    clear, fetch, quiet = program.tap(CLEAR), program.tap(FETCH), program.tap(QUIET)
    program.sleep()
    fetch()
    clear(program.optimizer)
    assert forward(program.module, 1, x=2) == "result"
    quiet()
    backward()
    step(program.optimizer)
    assert program.told == [((program.optimizer,), "DZFB", (id(program.optimizer),), 0, 0)]
    assert not program.hooked
    program.grad = False
    forward(program.module)
    assert program.recorder.wake()[:3] == ("E", (), 1)
    forward(program.module)
    assert program.hooked == ["before", "after"]


def test_a_model_that_is_given_a_tensor_with_a_gradient_is_told_apart(program: Program) -> None:
    forward, step = program.tap(FORWARD, kind=2), program.tap(UPDATE)
    program.recorder.set_tensor_types(torch.Tensor)
    program.sleep()
    asked, plain = torch.zeros(1, requires_grad=True), torch.zeros(1)
    for given in ((plain,), (plain, asked), (plain, [asked]), (asked,)):
        forward(program.module, *given, x=asked)
    program.grad = False
    forward(program.module, asked)
    step(program.optimizer)
    assert program.told[0][1] == "FPFPE"


def test_only_outermost_calls_are_acts(program: Program) -> None:
    inner_backward, inner_step, inner = program.tap(BACKWARD), program.tap(UPDATE), program.tap(FORWARD, kind=2)
    other = object()
    outer = program.tap(FORWARD, lambda m: inner(m), kind=2)
    backward = program.tap(BACKWARD, lambda: (inner_backward(), inner(program.module)))
    step = program.tap(UPDATE, lambda o: inner_step(other))
    program.sleep()
    outer(program.module)
    backward()
    step(program.optimizer)
    assert program.told == [((program.optimizer,), "FBI", (id(other),), 0, 0)]


def test_a_model_within_an_update_cannot_be_followed(program: Program) -> None:
    forward = program.tap(FORWARD, kind=2)
    step = program.tap(UPDATE, lambda o: forward(program.module))
    program.sleep()
    step(program.optimizer)
    assert program.told[0][1] == "X"


def test_a_skipped_update_is_told_of_its_scaler(program: Program) -> None:
    step, skips = program.tap(UPDATE), program.tap(SCALED)
    updates = program.tap(SCALED, lambda scaler, optimizer: step(optimizer))
    program.sleep()
    skips("scaler", program.optimizer)
    updates("scaler", program.optimizer)
    assert [said[3] for said in program.told] == [1, 0]


def test_an_exception_of_the_program_passes_and_leaves_nothing_open(program: Program) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("theirs")

    calls = [program.tap(act, fails, kind=2 if act == FORWARD else 0) for act in (FORWARD, BACKWARD, UPDATE, CLEAR, FETCH, SCALED, COLLECTIVE)]
    program.sleep()
    for call in calls:
        with pytest.raises(KeyError, match="theirs"):
            call(program.module)
    assert program.recorder.open_acts()[0] == 0 and not program.recorder.open_acts()[2]
    assert program.recorder.wake()[4] == 0


def test_an_error_of_ours_ends_the_sleep_and_nothing_else(program: Program) -> None:
    errors: list[BaseException] = []
    program.recorder.on_error = errors.append

    def tell(*said: Any) -> None:
        raise ValueError("ours")

    step = program.tap(UPDATE)
    program.recorder.sleep(tell)
    assert step(program.optimizer) == "result"
    assert [str(e) for e in errors] == ["ours"] and not program.recorder.asleep


def test_another_thread_that_trains_ends_the_sleep(program: Program) -> None:
    backward, forward = program.tap(BACKWARD), program.tap(FORWARD, kind=2)
    program.sleep()
    for call in (lambda: forward(program.module), backward):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert [(said[1], said[3]) for said in program.told] == [("", 2)]
    assert not program.recorder.asleep and program.hooked == ["before", "after"]


def test_collectives_are_counted_by_group_and_open_ones_are_told(program: Program) -> None:
    group, seen = object(), []
    reduce = program.tap(COLLECTIVE, lambda *args, **kwargs: seen.append(program.recorder.open_acts()[2]))
    reduce.group_at = 2
    program.sleep()
    reduce("tensor", "op", group)
    reduce("tensor", group=group)
    reduce("tensor")
    assert [(args, names) for ((_, args, names, since, _),) in seen if since > 0] == [
        (("tensor", "op", group), None), (("tensor", group), ("group",)), (("tensor",), None),
    ]  # fmt: skip
    assert program.recorder.wake()[3] == [(group, 2), (None, 1)]


def test_updates_that_are_alike_are_only_counted(program: Program) -> None:
    forward, backward, step = program.tap(FORWARD, kind=2), program.tap(BACKWARD), program.tap(UPDATE)

    def train(number: int, optimizer: object) -> None:
        for _ in range(number):
            forward(program.module)
            backward()
            step(optimizer)

    program.sleep()
    def expect() -> None:
        program.recorder.expect((("FB", (), id(program.optimizer)),), 3)

    expect()
    train(3, program.optimizer)
    expect()
    train(4, program.optimizer)
    assert [said[1:] for said in program.told] == [("", (), 3, 3), ("", (), 3, 3), ("FB", (), 0, 0)], "what was told ends what was expected"
    expect()
    train(1, program.optimizer)
    train(1, other := object())
    backward()
    expect()
    train(1, program.optimizer)
    assert [said[1:] for said in program.told[3:]] == [("FB", (), 0, 1), ("BFB", (), 0, 0)] and other
    expect()
    train(2, program.optimizer)
    forward(program.module)
    assert program.recorder.wake() == ("F", (), 13, [], 0, 2)


def test_updates_that_come_in_a_cycle_are_only_counted(program: Program) -> None:
    backward, clear, step, other = program.tap(BACKWARD), program.tap(CLEAR), program.tap(UPDATE), object()
    cycle = ("ZB", (id(program.optimizer),), id(program.optimizer)), ("B", (), id(program.optimizer)), ("B", (), id(other))

    def train(*optimizers: object) -> None:
        for i, optimizer in enumerate(optimizers):
            if i % 3 == 0:
                clear(optimizer)
            backward()
            step(optimizer)

    program.sleep()
    program.recorder.expect(cycle, 7)
    train(*(program.optimizer, program.optimizer, other) * 2, program.optimizer)
    assert [said[1:] for said in program.told] == [("", (), 3, 7)]
    program.recorder.expect(cycle, 7)
    train(program.optimizer, other)
    assert [said[1:] for said in program.told[1:]] == [("B", (), 0, 1)], "the second update was another's"
    program.recorder.expect(cycle, 7)
    program.recorder.expect((), 5)
    train(program.optimizer)
    assert [said[4] for said in program.told[2:]] == [0]
    for wrong in (((1,),), (("B", (), "x"),), (("B", ("x",), 1),), "B"):
        with pytest.raises((TypeError, ValueError)):
            program.recorder.expect(wrong, 1)


def test_which_functions_are_acts() -> None:
    assert act_of("torch.distributed.all_reduce") == COLLECTIVE and act_of("torch.distributed.new_group") == 0
    assert act_of("torch.distributed.send") == 0 and act_of("torch.optim.Optimizer.step") == asleep.UPDATE and act_of("torch.save") == 0
