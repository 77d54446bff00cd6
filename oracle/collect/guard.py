"""The guard of `instrument`, for a recording: with the first error of ours all of it ends and says so, and the user's program goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from proctor.instrument.guard import Guard
from proctor.native.twins.handlers import from_handler
from proctor.oracle.collect.edges.regions import unseen

RECORDING: Final = "recording"  # the one probe


class RecordingGuard(Guard):
    """Runs functions of ours within a program that must not notice when they fail.

    Args:
        failed: is told of the first error, in a line.
        compiled: dynamo is to leave guarded functions out.
    """

    def __init__(self, failed: Callable[[str], None], *, compiled: bool) -> None:
        super().__init__()
        self._compiled = compiled
        self.on_end = lambda: failed(self.notes[-1].removeprefix("oracle: "))

    def hook(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function, without its result and its errors."""
        run = self.guarded(RECORDING, function)
        return unseen(run) if self._compiled else run

    def fail(self, error: Exception) -> None:
        """Say that recording failed; later errors are silent. What a signal handler of the program's raised is raised again."""
        if from_handler(error):
            raise error
        self.report(RECORDING, error)

    def told(self, probe: str, error: BaseException) -> str:
        """What is said of an error."""
        return f"oracle: recording failed: {type(error).__name__}: {error}".splitlines()[0]
