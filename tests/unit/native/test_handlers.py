"""What a signal handler of the program's raises while our own code runs reaches the program: a SIGTERM that ends it, a timeout."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proctor.instrument.guard import Guard
from proctor.native.twins import tap as _twins
from proctor.native.twins.handlers import from_handler

try:
    from proctor.native import _native
except ImportError:  # built without the extension
    _native = None


class TooLongError(Exception):
    def __init__(self, seconds: int, *, where: str = "here") -> None:
        super().__init__(seconds)
        self.seconds, self.where = seconds, where


class Handlers:
    """Handlers of every shape."""

    def method(self, *_: object) -> None:
        raise TooLongError(3)

    def __call__(self, *_: object) -> None:
        self._deeper()

    def _deeper(self) -> None:
        raise TooLongError(3)


def partly(word: str, *_: object) -> None:
    raise TooLongError(3, where=word)


BOTH = [pytest.param(_twins, id="python"), *([pytest.param(_native, id="native")] if _native is not None else [])]
SHAPES: dict[str, Callable[..., Any]] = {
    "function": lambda *_: Handlers().method(), "method": Handlers().method, "object": Handlers(), "partial": functools.partial(partly, "there"),
}  # fmt: skip


@pytest.fixture(params=SHAPES)
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, SHAPES[request.param])
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=BOTH)
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def rec(impl: Any) -> Any:
    made = impl.Recorder()
    made.enabled = True
    return made


def plain(x: int) -> int:
    return x + 1


def ours(*_: Any) -> None:
    signal.raise_signal(signal.SIGALRM)
    time.sleep(0)  # the handler runs at the latest here


def late(call: Callable[[], object]) -> None:
    """Call, and give what was put off the time to come."""
    call()
    for _ in range(1000):
        pass


@pytest.mark.parametrize("place", ["before", "after"])
def test_it_is_raised_once_our_hook_is_through_and_the_hook_stays(impl: Any, rec: Any, handled: None, place: str) -> None:
    told: list[BaseException] = []
    rec.on_error = told.append
    tap = impl.Tap(rec, plain, 1, **{place: ours})
    with pytest.raises(TooLongError) as raised:
        late(lambda: tap(1))
    assert raised.value.seconds == 3 and told == []
    assert getattr(tap, place) is ours


def test_an_exit_keeps_its_code(impl: Any, rec: Any) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(42)

    before = signal.signal(signal.SIGTERM, leave)
    tap = impl.Tap(rec, plain, 1, before=lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as raised:
            late(lambda: tap(1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 42


def test_the_guard_lets_it_pass_and_its_probe_goes_on(handled: None) -> None:
    guard = Guard()
    with pytest.raises(TooLongError):
        guard.run("state", ours)
    assert guard.errors == 0 and guard.run("state", lambda: 7) == 7


def test_an_error_of_ours_is_none_of_the_program_s(handled: None, capsys: pytest.CaptureFixture[str]) -> None:
    guard = Guard()
    guard.run("state", lambda: 1 / 0)
    assert guard.errors == 1 and "ZeroDivisionError" in capsys.readouterr().err
    assert not from_handler(ValueError("never raised"))
