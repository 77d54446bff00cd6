"""The one place where an error of the collector is swallowed: recording ends and says so, and the user's program goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from proctor.instrument.guard import say
from proctor.oracle.collect.regions import unseen


class Guard:
    """Runs functions of ours within a program that must not notice when they fail.

    Args:
        failed: is told of the first error, in a line.
        compiled: dynamo is to leave guarded functions out.
    """

    def __init__(self, failed: Callable[[str], None], *, compiled: bool) -> None:
        self._tell, self._compiled = failed, compiled
        self._failed = False

    def guarded(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function, without its result and its errors."""

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - the user's program goes on
                self.fail(e)

        return unseen(run) if self._compiled else run

    def fail(self, error: Exception) -> None:
        """Say that recording failed; later errors are silent."""
        if self._failed:
            return
        self._failed = True
        if os.environ.get("PROCTOR_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        line = f"recording failed: {type(error).__name__}: {error}".splitlines()[0]
        say(f"oracle: {line}")
        self._tell(line)
