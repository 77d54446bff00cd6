"""verify/transport/deaths.py: by which signal a process ended, told by the kernel to somebody who is not its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proctor.verify.transport.deaths import Death, Deaths

CRASHES = "import ctypes, sys; sys.stdin.read(1); ctypes.string_at(0)"
WAITS = "import sys; sys.stdin.read(1)"


@pytest.fixture
def deaths() -> Iterator[Deaths]:
    made = Deaths()
    yield made
    made.close()


def started(deaths: Deaths, code: str, name: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
    deaths.watch({name: process.pid})
    return process


def told(deaths: Deaths, number: int = 1) -> list[Death]:
    found: list[Death] = []
    until = time.monotonic() + 10
    while len(found) < number and time.monotonic() < until:
        time.sleep(0.02)
        found += deaths.take()
    return found


def test_a_crash_is_told_of_a_process_that_nobody_has_reaped(deaths: Deaths) -> None:
    process = started(deaths, CRASHES, "1-77")
    assert process.stdin is not None
    process.stdin.close()
    assert told(deaths) == [Death("1-77", "SIGSEGV", "a crash in native code")]
    assert process.wait() == -signal.SIGSEGV, "its status is still its parent's to take"


def test_of_several_each_is_told_by_its_name(deaths: Deaths) -> None:
    one, other, third = (started(deaths, WAITS, name) for name in "abc")
    for process, number in ((one, signal.SIGKILL), (other, signal.SIGABRT), (third, signal.SIGTERM)):
        process.send_signal(number)
    found = {d.process: d.name for d in told(deaths, 2)}
    assert found == {"a": "SIGKILL", "b": "SIGABRT"}, "who is asked to end has had no accident"
    for process in (one, other, third):
        process.wait()


def test_an_ordinary_end_and_a_process_that_is_gone_are_nothing(deaths: Deaths) -> None:
    process = started(deaths, WAITS, "a")
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait() == 0
    deaths.watch({"gone": process.pid, "a": process.pid})
    time.sleep(0.1)
    assert deaths.take() == []


def pidfds() -> int:
    return sum("pidfd" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_what_is_held_is_let_go() -> None:
    before, deaths = pidfds(), Deaths()
    process = started(deaths, WAITS, "a")
    assert pidfds() == before + 1
    deaths.close()
    until = time.monotonic() + 5
    while pidfds() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert pidfds() == before
    process.kill()
    process.wait()
