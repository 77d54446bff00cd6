"""Who asks for what a hook sees: the nearest frame, if it is the user's and nobody's but torch's and ours lie in between. Used by `schedules.py` and `ahead.py`."""

from __future__ import annotations

import os
import sys
import types

from proctor.instrument.patch.usercode import library_prefixes


class Askers:
    """Remembers whose each file is."""

    def __init__(self) -> None:
        self._libraries, self._between = library_prefixes(), _between()
        self._whose: dict[str, str] = {}  # by file

    def of(self, frame: types.FrameType | None) -> types.FrameType | None:
        """The user's frame that asked for this.

        Args:
            frame: of the hook.
        """
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._whose:
                path = os.path.abspath(name)
                self._whose[name] = "ours" if path.startswith(self._between) else "library" if path.startswith(self._libraries) else "user"
            if self._whose[name] != "ours":
                return frame if self._whose[name] == "user" else None
            frame = frame.f_back
        return None


def _between() -> tuple[str, ...]:
    """Folders of torch and of Proctor, whose frames lie between a line and the call that it asks for."""
    named = ("torch", "proctor", *(f"proctor.{part}" for part in ("instrument", "invariants", "native")))
    files = (getattr(sys.modules.get(name), "__file__", None) for name in named)
    return tuple(os.path.dirname(os.path.abspath(file)) + "/" for file in files if file)
