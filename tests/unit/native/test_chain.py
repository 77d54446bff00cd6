"""Hooks as one: the native chain and its twin call the same, in the same order, and errors end where they should."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from proctor.native import ACTIVE, Chain
from proctor.native.twins.chain import Chain as Twin

KINDS = [Twin, *([Chain] if ACTIVE == "native" else [])]


class Tensors:  # as torch has them: a class with this method, and classes of it
    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        raise AssertionError("code of the program's ran")


class Parameters(Tensors):
    pass


class Sub(Tensors):
    pass


class Duck:
    __torch_function__ = Tensors.__torch_function__


class World:
    """Hooks that say their name, and what a chain asks."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.wanted, self.asked = True, 0
        self.off: set[str] = set()
        self.over: set[str] = set()
        self.taken: list[tuple[str, Exception]] = []
        self.takes = True
        self.mode = 0

    def hook(self, name: str, error: BaseException | None = None) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.said.append((name, *args))
            if error is not None:
                raise error

        return call

    def chain(self, kind: Any, *hooks: tuple[str, bool, Callable[..., None]], dispatched: bool = False) -> Any:
        def wants() -> bool:
            self.asked += 1
            return self.wanted

        def takes(label: str, error: Exception) -> bool:
            self.taken.append((label, error))
            return self.takes

        def aside(run: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.said.append("aside")
            run(*args)

        return kind(hooks, wants, self.off, self.over, takes, (lambda: 0, lambda: self.mode), aside, Tensors, Parameters, dispatched)

    def names(self) -> str:
        return " ".join(one if isinstance(one, str) else one[0] for one in self.said)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_in_order_with_what_the_chain_was_given(kind: Any, world: World) -> None:
    chain = world.chain(kind, ("", True, world.hook("a")), ("p", False, world.hook("b")), ("q", True, world.hook("c")))
    assert chain((1,), {"x": 2}, "result", False) is None
    assert world.said == [(name, (1,), {"x": 2}, "result", False) for name in "abc"]
    assert world.asked == 1, "once, however many hooks there are"
    chain()
    assert world.said[3:] == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_wanted_or_off_is_left_out(kind: Any, world: World) -> None:
    chain = world.chain(kind, ("", True, world.hook("given")), ("p", False, world.hook("p")), ("q", True, world.hook("steady")))
    world.wanted = False
    chain(1)
    assert world.names() == "given steady"
    world.off.add("q")
    chain(1)
    assert world.names() == "given steady given"
    world.off.clear()
    world.over.add("q")
    world.wanted = True
    chain(1)
    assert world.names() == "given steady given given p"


@pytest.mark.parametrize("kind", KINDS)
def test_whether_rows_are_wanted_is_asked_behind_the_given_hook(kind: Any, world: World) -> None:
    """It may begin a step, and with that switch sampling."""
    world.wanted = False

    def begins(*args: Any) -> None:
        world.wanted = True

    world.chain(kind, ("", True, begins), ("p", False, world.hook("p")))(1)
    assert world.names() == "p"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_probe_ends_here_and_the_others_run(kind: Any, world: World) -> None:
    error = ValueError("broken")
    chain = world.chain(kind, ("p", False, world.hook("p", error)), ("q", False, world.hook("q")))
    chain(1)
    assert world.names() == "p q" and world.taken == [("p", error)]
    assert error.__traceback__ is not None, "it says where"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_programs_handler_goes_on(kind: Any, world: World) -> None:
    error = ValueError("of the program")
    world.takes = False
    with pytest.raises(ValueError, match="of the program") as raised:
        world.chain(kind, ("p", False, world.hook("p", error)), ("q", False, world.hook("q")))(1)
    assert raised.value is error and world.names() == "p"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_interrupt_goes_on_and_is_no_error_of_a_probe(kind: Any, error: BaseException, world: World) -> None:
    with pytest.raises(type(error)):
        world.chain(kind, ("p", False, world.hook("p", error)))(1)
    assert world.taken == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_given_hook_goes_to_the_tap(kind: Any, world: World) -> None:
    with pytest.raises(ValueError, match="given"):
        world.chain(kind, ("", True, world.hook("a", ValueError("given"))), ("p", False, world.hook("p")))(1)
    assert world.names() == "a" and world.taken == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_what_is_asked_goes_to_the_tap(kind: Any, world: World) -> None:
    def broken(*args: Any) -> bool:
        raise RuntimeError("asked")

    with pytest.raises(RuntimeError, match="asked"):
        kind((("p", False, world.hook("p")),), broken, set(), set(), broken, (), broken, Tensors, Parameters)(1)
    with pytest.raises(RuntimeError, match="asked"):
        kind((("p", False, world.hook("p", ValueError())),), lambda: True, set(), set(), broken, (), broken, Tensors, Parameters)(1)


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_mode_of_the_program_is_on_hooks_run_aside(kind: Any, world: World) -> None:
    chain = world.chain(kind, ("", True, world.hook("a")), ("p", False, world.hook("b")))
    world.mode = 1
    chain(1, 2)
    assert world.said == ["aside", ("a", 1, 2), ("b", 1, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (((), None), "a b"), (((Tensors(), Parameters(), 1, "x", object()), {"out": Tensors()}), "a b"), (((Sub(),), None), "aside a b"),
        (((), {"input": Sub()}), "aside a b"), ((([Tensors(), Sub()],), None), "aside a b"), (((), None, Sub(), False), "aside a b"),
        (((Duck(),), None), "aside a"), ((({"x": Duck()},), None), "aside a"), (((Sub(),), None, Duck(), False), "aside a"),
        ((([*[0] * 1000, Duck()],), None), "a b"),
    ],
)  # fmt: skip
def test_what_runs_where_an_argument_or_the_result_has_a_torch_function(kind: Any, given: tuple[Any, ...], said: str, world: World) -> None:
    hooks = ("", True, world.hook("a")), ("p", True, world.hook("b"))
    world.chain(kind, *hooks, dispatched=True)(*given)
    assert world.names() == said
    world.said.clear()
    world.chain(kind, *hooks)(*given)  # a model, which may be given anything: its hooks look for tensors themselves
    assert world.names() == (said if said.endswith("b") else said + " b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_in_a_cycle_is_collected(kind: Any, world: World) -> None:
    class Holder:
        def hook(self, *args: Any) -> None:
            pass

    holder = Holder()
    holder.chain = world.chain(kind, ("", True, holder.hook))  # type: ignore[attr-defined]
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(ACTIVE != "native", reason="the extension is not in use")
def test_what_is_no_chain_of_hooks_is_refused() -> None:
    for hooks in (("p",), (("p", True),), ((1, True, print),)):
        with pytest.raises((TypeError, SystemError)):
            Chain(hooks, bool, set(), set(), print, (), print, Tensors, Parameters)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keyword"):
        Chain((), bool, set(), set(), print, (), print, Tensors, Parameters)(x=1)  # type: ignore[call-arg]
