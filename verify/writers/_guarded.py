"""A writer that cannot hurt: its first error is said once, and it is not asked again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from proctor.invariants.invariant import Severity
from proctor.verify.writers import Writer

_LONG: Final = 300  # characters of an error that are worth showing
_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")  # in a URL
_SECRETS: Final = re.compile(r"(?i)((?:key|token|password|secret|authorization)\w*[\"']?\s*[=:]\s*[\"']?)[^\s\"'&,;]+")


def told(error: BaseException) -> str:
    """An error in one line, without what looks like a credential."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return _SECRETS.sub(r"\1***", _CREDENTIALS.sub("//***@", line))[:_LONG]


class Guarded:
    """Passes calls on until one fails.

    Args:
        name: of the tool, for the one message.
        writer: that does the work.
        say: told of the failure.
    """

    def __init__(self, name: str, writer: Writer, say: Callable[[str], None]) -> None:
        self.name = name
        self.trouble = ""  # why it is off
        self._writer: Writer | None = writer
        self._say = say

    def series(self, step: int, values: Mapping[str, float]) -> None:
        self._do(lambda writer: writer.series(step, values))

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        self._do(lambda writer: writer.incident(step, title, text, severity))

    def close(self) -> None:
        self._do(lambda writer: writer.close())
        self._writer = None

    def _do(self, call: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            call(self._writer)
        except Exception as error:  # noqa: BLE001  the swallowing place of all writers
            self._writer = None
            self.trouble = told(error)
            self._say(f"{self.name} is not written to any more: {self.trouble}")
