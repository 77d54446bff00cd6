"""Reading tensors while other threads train: nobody reads what another thread writes."""

from __future__ import annotations

import _thread
import ast
import threading
from pathlib import Path

import pytest

from proctor.instrument import probes
from proctor.instrument.steps.turns import Turns


class Thread:
    """Does one thing after another in a thread of its own, as it is told."""

    def __init__(self) -> None:
        self._go, self._done, self._what = threading.Semaphore(0), threading.Semaphore(0), lambda: None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            self._what()
            self._done.release()

    def begin(self, what) -> None:
        self._what = what
        self._go.release()

    def wait(self, seconds: float = 60) -> bool:
        return self._done.acquire(timeout=seconds)

    def do(self, what) -> None:
        self.begin(what)
        assert self.wait()


def turns() -> tuple[Turns, list[str]]:
    told: list[str] = []
    return Turns(lambda: told.append("broken")), told


def looks(ours: Turns) -> bool:
    return ours.look(lambda: True) is True


def test_one_thread_writes_and_looks_as_it_likes() -> None:
    ours, told = turns()
    ours.begin_write()
    ours.begin_write()  # one within another
    assert looks(ours)
    ours.end_write()
    ours.end_write()
    assert looks(ours) and not told


def test_a_thread_that_trained_before_another_one_is_no_trouble() -> None:
    ours, told = turns()
    other = Thread()
    other.do(ours.begin_write)
    other.do(ours.end_write)
    ours.begin_write()
    assert looks(ours) and not told


def test_nobody_looks_while_another_thread_writes_and_never_after_that() -> None:
    ours, told = turns()
    other = Thread()
    other.do(ours.begin_write)
    assert not looks(ours) and told == ["broken"]
    other.do(ours.end_write)
    assert not looks(ours) and told == ["broken"]  # said once


def test_who_begins_to_write_waits_for_the_look_of_another_thread() -> None:
    ours, told = turns()
    other = Thread()

    def within() -> bool:
        assert looks(ours)  # one within another
        other.begin(ours.begin_write)
        assert not other.wait(0.2)
        return True

    assert ours.look(within)
    assert other.wait() and not told


def test_gradients_are_read_only_while_nobody_else_writes_them() -> None:
    torch = pytest.importorskip("torch")
    weight, bare = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    ours, told = turns()
    assert ours.gradients([weight, bare]) == [weight.grad, None]
    Thread().do(ours.begin_write)
    assert ours.gradients([weight, bare]) is None and told == ["broken"]


def test_two_threads_that_write_at_once_are_seen() -> None:
    ours, told = turns()
    other = Thread()
    other.do(ours.begin_write)
    ours.begin_write()
    assert told == ["broken"]


def test_a_thread_of_autograds_engine_works_for_the_backward_that_runs() -> None:
    ours, told = turns()
    done = threading.Event()

    def nested() -> None:  # a recomputation, in a thread that Python did not start
        ours.begin_write()
        told.append("looks" if looks(ours) else "does not look")
        ours.end_write()
        done.set()

    ours.begin_write()
    _thread.start_new_thread(nested, ())
    assert done.wait(60)
    ours.end_write()
    assert told == ["looks"] and looks(ours)


def step(ours: Turns, optimizer: int) -> None:
    """One update of a loop, acts that do not overlap with another's in time."""
    act(ours)
    ours.updated(optimizer)


def act(ours: Turns) -> None:
    ours.begin_write()
    ours.end_write()


def test_two_loops_one_within_another_are_seen_though_no_act_overlaps() -> None:
    ours, told = turns()
    other = Thread()
    for _ in range(2):
        step(ours, 1)
        other.do(lambda: step(ours, 2))
    assert not told  # each whole update behind the other: the clock can tell them
    act(ours)
    other.do(lambda: act(ours))
    step(ours, 1)
    assert not told  # the other one may only compute something within our step
    other.do(lambda: step(ours, 2))
    assert told == ["broken"]


def test_a_thread_that_trains_while_this_one_waits_within_its_step_is_no_trouble() -> None:
    ours, told = turns()
    other = Thread()
    for _ in range(3):
        act(ours)
        other.do(lambda: step(ours, 2))
        other.do(lambda: step(ours, 2))
        step(ours, 1)
    assert not told


def test_one_loop_that_a_pool_of_threads_carries_out_is_no_trouble() -> None:
    ours, told = turns()
    pool = [Thread(), Thread(), Thread()]
    for i in range(12):
        pool[i % 3].do(lambda: act(ours))
        pool[(i * 2 + 1) % 3].do(lambda: act(ours))
        pool[(i // 2) % 3].do(lambda: ours.updated(7))
    assert not told


def test_loops_without_an_optimizer_are_their_threads_own() -> None:
    ours, told = turns()
    other = Thread()
    act(ours)
    other.do(lambda: act(ours))
    act(ours)
    ours.updated()
    other.do(lambda: (act(ours), ours.updated()))
    assert told == ["broken"]


def test_probes_ask_the_sink_for_gradients() -> None:
    """One that read them itself, while the backward of another thread replaced them, ended the process."""
    home = Path(probes.__file__).parent
    nodes = [(path, node) for path in home.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert [path for path, node in nodes if isinstance(node, ast.Attribute) and node.attr == "grad"] == [home / "__init__.py"]
