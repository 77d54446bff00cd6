"""Threads that the program does not see: they begin and end as others do."""

from __future__ import annotations

import _thread
import os
import threading
import time

import pytest

from proctor.instrument.own_thread import OwnThread


def test_it_runs_beside_the_others_and_is_not_listed() -> None:
    before, goes_on, idents = threading.enumerate(), threading.Event(), []
    one = OwnThread(lambda: (idents.append(threading.get_ident()), goes_on.wait(60), None)[-1])
    assert not one.is_alive()
    one.start()
    assert one.is_alive() and not one.is_here() and threading.enumerate() == before
    began = time.monotonic()
    one.join(0.05)
    assert one.is_alive() and 0.04 < time.monotonic() - began < 30, "it waits no longer than it may"
    goes_on.set()
    one.join(60)
    assert not one.is_alive() and idents == [one.ident] and idents[0] != threading.get_ident()
    one.join(60)  # of one that has ended: at once, as often as one likes


def test_within_itself_it_is_here_and_waits_for_nothing() -> None:
    found: list[bool] = []

    def work() -> None:
        one.join(60)
        found.append(one.is_here())

    one = OwnThread(work)
    one.join(60)  # of one that never began
    one.start()
    one.join(30)
    assert found == [True]
    with pytest.raises(RuntimeError):
        one.start()


def test_a_child_of_the_process_does_not_wait_for_it() -> None:
    goes_on = threading.Event()
    one = OwnThread(lambda: (goes_on.wait(60) and None) or None)
    one.start()
    child = os.fork()
    if child == 0:
        one.join(60)
        os._exit(1 if one.is_alive() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    goes_on.set()
    one.join(60)


def test_where_no_thread_can_begin_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none)
    one = OwnThread(lambda: None)
    with pytest.raises(RuntimeError):
        one.start()
    assert not one.is_alive()
    one.join(60)


def test_what_raises_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)

    def work() -> None:
        raise KeyboardInterrupt

    one = OwnThread(work)
    one.start()
    one.join(60)
    assert not one.is_alive()
    deadline = time.monotonic() + 30
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(told) == 1
