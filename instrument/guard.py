"""The one place where an error of ours is swallowed: counted, said once, and the probe that raised is off.

Nothing of Proctor's may reach the user's program (docs/design.md, "the user's run is sacred").
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

from proctor.invariants.blindness import ALL, CALLS, STATES, VALUES
from proctor.invariants.descriptor import identity
from proctor.native.twins.handlers import from_handler

_ENDS: Final = {"state": (STATES,), "last-look": (STATES,), "loader worker": (f"{VALUES}rng",), "user code": (CALLS,), "early names": (CALLS,)}
_NOTHING: Final = frozenset(  # no rule reads what these do
    {"capsules", "capsule writer", "freeze", "stream", "stream-close", "exit", "attach", "adopt", "tell", "glance"}
)


class Guard:
    """Runs probes. A probe that raises is disabled for the rest of the process, and what it recorded ends there.

    Attributes:
        ended: what is recorded no more (`invariants.blindness`), and the step in which that began.
        step: gives the present step.
        on_end: called after something was added to `ended`.
        off: labels of what raised, which runs no more.
        ends: what the probes of the owner record, by label; of labels that nobody knows it is everything.
    """

    def __init__(self) -> None:
        self.errors = 0
        self.ended: list[tuple[str, int]] = []
        self.step: Callable[[], int] = lambda: -1
        self.on_end: Callable[[], None] | None = None
        self.ends: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []
        self.off: set[str] = set()
        self._lock = threading.Lock()

    def run(self, probe: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; `None` when it raised or was disabled by an earlier error."""
        if probe in self.off:
            return None
        try:
            return function(*args)
        except Exception as e:
            if not self.takes(probe, e):
                raise
            return None

    def takes(self, probe: str, error: Exception) -> bool:
        """Report an error of ours; False for one of the program's, whose handler of a signal ran there: raise it again."""
        if from_handler(error):
            return False
        self.report(probe, error)
        return True

    def guarded(self, probe: str, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function for where its result is not wanted: without its errors, and without a call after the first."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            self.run(probe, functools.partial(function, **kwargs) if kwargs else function, *args)

        return run

    def report(self, probe: str, error: BaseException) -> None:
        """Count an error and say it once on stderr; later ones of the same probe are silent."""
        with self._lock:
            self.errors += 1
            if probe in self.off:
                return
            self.off.add(probe)
            note = self.told(probe, error)
            self.notes.append(note)
            step = self.step()
            self.ended += [(what, step) for what in self._ends(probe)]
        if os.environ.get("PROCTOR_DEBUG", "") not in ("", "0"):
            traceback.print_exception(error)
        say(note)
        if self.on_end is not None:
            self.on_end()

    def told(self, probe: str, error: BaseException) -> str:
        """What is said of an error."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno}" if frames else "?"
        return f"probe {probe} is off after {type(error).__name__}: {str(error)[:200]} ({where})"

    def stop(self, note: str) -> None:
        """Nothing of this process is judged, also of the steps before; said once."""
        with self._lock:
            self.notes.append(note)
            self.ended.append((ALL, -1))
        say(note)
        if self.on_end is not None:
            self.on_end()

    def _ends(self, probe: str) -> tuple[str, ...]:
        if probe in _NOTHING:
            return ()
        if probe.startswith("late "):
            return (CALLS,)
        return self.ends.get(probe) or _ENDS.get(probe, (ALL,))

    def disabled(self, probe: str) -> bool:
        return probe in self.off


class _Terminal:
    """What stderr was when we came: a program that closes it may have a file of its own at its number."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.file = identity(2)
        self.unsaid: list[str] = []

    def is_ours(self) -> bool:
        """Whether text may be written to `sys.stderr`."""
        if sys.stderr is not self.stream:
            return True  # the program put another in its place, which knows where to write
        return identity(2) == self.file or _is_harmless(2)


def _is_harmless(number: int) -> bool:
    """Whether it is a terminal, /dev/null or the like, which have no content."""
    found = identity(number)
    return found is not None and stat.S_ISCHR(found[2])


_TERMINAL = _Terminal()


def began_with(stderr: os.stat_result | None) -> None:
    """What was behind descriptor 2 when the process began, long before we came; None: nothing."""
    _TERMINAL.file = (stderr.st_dev, stderr.st_ino, stat.S_IFMT(stderr.st_mode)) if stderr is not None else None


_MAX_UNSAID: Final = 20


def say(text: str, *, gap: bool = True) -> None:
    """One line on stderr, if there is one; a closed stderr is not an error. What cannot be said is kept for `unsaid`.

    Args:
        gap: it says what is not recorded, which a report names; else it is for somebody who looks on, and is not kept.
    """
    if not _TERMINAL.is_ours():
        if gap and len(_TERMINAL.unsaid) < _MAX_UNSAID:
            _TERMINAL.unsaid.append(text)
        return
    with contextlib.suppress(OSError, ValueError):
        print(f"proctor: {text}", file=sys.stderr, flush=True)


def unsaid() -> list[str]:
    """What there was nobody to say to, for the notes of the process."""
    return list(_TERMINAL.unsaid)
