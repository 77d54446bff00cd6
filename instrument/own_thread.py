"""Threads of ours beside a program's, which the program does not see.

A test that forbids threads left behind (Lightning's own suite does), a program that waits until it is alone: they ask `threading`, which
lists what `threading.Thread` starts. These threads are started below it. They are daemons: nothing waits for them when the interpreter
ends, so `atexit` has us do it before. What runs in them must not call `threading.current_thread()`, which would list them as `Dummy-N`.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable


class OwnThread:
    """A daemon thread that `threading.enumerate()` does not list.

    Args:
        work: what it does; it must not raise.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.ident: int | None = None  # once it runs
        self._work = work
        self._pid = 0  # of the process that started it
        self._over = False
        self._end = _thread.allocate_lock()  # free once it has ended
        self._end.acquire()

    def start(self) -> None:
        """Begin; once only."""
        if self._pid:
            raise RuntimeError("a thread begins once")
        self._pid = os.getpid()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # there are too many, or the interpreter ends
            self._pid = 0
            raise

    def _run(self) -> None:
        self.ident = _thread.get_ident()
        try:
            self._work()
        finally:
            self._over = True  # before the lock: who asks for the time of a thread that is gone may crash
            self._end.release()

    def is_alive(self) -> bool:
        """Whether it was started and has not ended; never in a child of the process that started it."""
        return self._pid == os.getpid() and not self._over

    def is_here(self) -> bool:
        """Whether the caller is this thread."""
        return self.is_alive() and self.ident == _thread.get_ident()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, so long at most; not at all within itself or where it does not run."""
        if self.is_alive() and not self.is_here() and self._end.acquire(timeout=timeout_s):
            self._end.release()
