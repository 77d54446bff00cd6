"""Who may read tensors when a program trains in several threads.

The observer reads the gradients of all models; a backward pass, a clearing or an update writes them without holding the interpreter's lock.
Reading one while another thread replaces it ends the process. So whoever reads gradients asks here (`look`, `gradients`): a thread that looks says so first and then asks whether another one
writes; one that begins to write says so first and then waits for looks to end (`looks.py`, `guarded_write`). Threads of autograd's own
engine take no turns: they work for a backward that is known.

Two loops whose acts never overlap in time may still be one within another: the clock would take them for one loop. So the acts between
two updates of a thread are an interval, and two threads with optimizers of their own whose intervals cross (A, B, A, B) train at once. One that
trains while another waits, and one loop that a pool of threads carries out, do not.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

LONGEST_WAIT_S: Final = 60.0  # for a look of another thread, which takes milliseconds
_MOST_TURNS: Final = 64  # of one interval that are kept


class _Loop:
    """What one thread does.

    Attributes:
        present: the turns in which it acted since its last update.
        before: the first and the last turn of the interval that its last update ended.
        optimizers: with which it has updated.
        crossed: loops whose acts lie between its own, and its own between theirs.
    """

    def __init__(self) -> None:
        self.present: list[int] = []
        self.before = (0, 0)
        self.optimizers: set[int] = set()
        self.crossed: weakref.WeakSet[_Loop] = weakref.WeakSet()

    def around(self, turn: int) -> bool:
        """Whether a turn lies between acts of one interval."""
        first, last = self.before
        return first < turn < last or (bool(self.present) and self.present[0] < turn < self.present[-1])


class Turns:
    """Looks and writes of the threads of this process.

    Args:
        on_break: called once, when two threads train at the same time.

    Attributes:
        broken: that was seen. Steps of two loops cannot be told apart, so nothing is looked at any more.
    """

    def __init__(self, on_break: Callable[[], None]) -> None:
        self._on_break = on_break
        self._looking: set[int] = set()
        self._writing: dict[int, int] = {}  # thread → how many of its writing calls run, one within another
        self.broken = False
        self._own = threading.local()  # `loop`: of each thread
        self._loops: dict[int, _Loop] = {}  # by thread; that of a thread that has ended goes when another one gets its number
        self._last: _Loop | None = None  # that acted
        self._turn = 0

    def acts(self) -> None:
        """This thread does something that belongs to an update: a forward, a backward, a clearing, the update."""
        known: _Loop | None = getattr(self._own, "loop", None)
        if known is not None and known is self._last and known.present:
            return
        loop = known if known is not None else _Loop()
        if known is None:
            self._own.loop = self._loops[threading.get_ident()] = loop
        if loop is not self._last:
            self._turn += 1
            self._last = loop
            for other in list(self._loops.values()):
                if other is not loop and any(map(other.around, loop.present)):
                    other.crossed.add(loop)
                    loop.crossed.add(other)
        if len(loop.present) < _MOST_TURNS:
            loop.present.append(self._turn)
        else:
            loop.present[-1] = self._turn

    def updated(self, optimizer: int | None = None) -> None:
        """This thread has updated parameters.

        Args:
            optimizer: which; `None` for an update by hand, which is this thread's own.
        """
        self.acts()
        loop: _Loop = self._own.loop
        loop.optimizers.add(id(loop) if optimizer is None else optimizer)
        loop.before, loop.present = (loop.present[0], loop.present[-1]), []
        if any(other.optimizers and loop.optimizers.isdisjoint(other.optimizers) for other in loop.crossed):
            self._break()

    def look(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` within a look; `None` where this thread may not read tensors now."""
        me = threading.get_ident()
        if me in self._looking:
            return function(*args)  # one look within another
        if self.broken:
            return None
        self._looking.add(me)
        try:
            if self._writing and self._others(me):
                self._break()
                return None
            return function(*args)
        finally:
            self._looking.discard(me)

    def gradients(self, parameters: Iterable[Any]) -> list[Any] | None:
        """The gradient of each parameter, None for one that has none; None for all where another thread may write them now."""
        found: list[Any] | None = self.look(lambda: [p.grad for p in parameters])
        return found

    def busy(self) -> bool:
        """Whether a call that writes gradients runs, in any thread."""
        return self.broken or bool(self._writing)

    def seen_running(self) -> None:
        """Another thread trains while a backward or an update runs, which was not told to `begin_write`."""
        self._break()

    def begin_write(self) -> None:
        """This thread is about to write gradients."""
        me = threading.get_ident()
        if self.broken:
            return
        self.acts()
        self._writing[me] = self._writing.get(me, 0) + 1
        if len(self._writing) > 1 and self._others(me):
            self._break()
        if not self._looking:
            return
        until = time.monotonic() + LONGEST_WAIT_S
        while self._looking - {me} and time.monotonic() < until:
            time.sleep(0.0005)

    def end_write(self) -> None:
        me = threading.get_ident()
        left = self._writing.get(me, 0) - 1
        if left > 0:
            self._writing[me] = left
        else:
            self._writing.pop(me, None)

    def _others(self, me: int) -> bool:
        return len(self._writing) > (me in self._writing) and _is_pythons(me)

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            self._on_break()


def _is_pythons(ident: int) -> bool:
    """Whether Python started this thread: one of autograd's engine did not."""
    return any(t.ident == ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def guarded_write(turns: Turns, before: Callable[..., None], after: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
    """The hooks of a call that writes gradients, so that no other thread reads them meanwhile."""

    def begins(args: tuple[Any, ...], kwargs: Any) -> None:
        turns.begin_write()
        before(args, kwargs)

    def ends(args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        turns.end_write()
        after(args, kwargs, result, raised)

    return begins, ends

