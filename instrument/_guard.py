"""The one place where an error of ours is swallowed: counted, said once, and the probe that raised is off.

Nothing of Proctor's may reach the user's program (docs/design.md, "the user's run is sacred").
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


class Guard:
    """Runs probes. A probe that raises is disabled for the rest of the process."""

    def __init__(self) -> None:
        self.errors = 0
        self.notes: list[str] = []
        self._disabled: set[str] = set()
        self._lock = threading.Lock()

    def run(self, probe: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; `None` when it raised or was disabled by an earlier error."""
        if probe in self._disabled:
            return None
        try:
            return function(*args)
        except Exception as e:  # noqa: BLE001 - this is the swallowing place
            self.report(probe, e)
            return None

    def report(self, probe: str, error: BaseException) -> None:
        """Count an error and say it once on stderr; later ones of the same probe are silent."""
        with self._lock:
            self.errors += 1
            if probe in self._disabled:
                return
            self._disabled.add(probe)
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{frames[-1].filename.rsplit('/', 2)[-1]}:{frames[-1].lineno}" if frames else "?"
            note = f"probe {probe} is off after {type(error).__name__}: {str(error)[:200]} ({where})"
            self.notes.append(note)
        say(note)

    def disabled(self, probe: str) -> bool:
        return probe in self._disabled


def say(text: str) -> None:
    """One line on stderr, if there is one; a closed stderr is not an error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"proctor: {text}", file=sys.stderr, flush=True)
