"""Fingerprint, norm and flags that each tracked value had when it was last looked at, packed.

The last steps are kept with what was seen before and after each. As an object a value that would be three hundred objects a
step of a small model, and freeing them with cold caches takes longer than all else that is kept of it.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

Print = tuple[int, int, float]  # fingerprint, flags, norm
Places = dict[str, tuple[list[Any], list[int]]]  # by role, keys and where theirs is

_NEVER: Final = 255  # flags of what was not looked at yet


class Seen:
    """What was seen last, at one moment."""

    __slots__ = ("_flags", "_fps", "_norms", "_places", "_without")

    def __init__(self, fps: bytes, norms: bytes, flags: bytes, places: Places, without: str = "") -> None:
        self._fps, self._norms, self._flags, self._places, self._without = fps, norms, flags, places, without

    def by_role(self) -> dict[str, tuple[list[Any], list[Print | None]]]:
        """By role the keys of what is tracked, and its print; `None`: never looked at."""
        fps, norms = memoryview(self._fps).cast("Q"), memoryview(self._norms).cast("d")
        prints: list[Print | None] = [
            None if flags == _NEVER else (fp, flags, norm) for fp, flags, norm in zip(fps, self._flags, norms)
        ]
        return {
            role: ([], []) if role == self._without else (keys, [prints[at] for at in places])
            for role, (keys, places) in self._places.items()
        }

    def without(self, role: str) -> Seen:
        """The same, but nothing of one role."""
        return Seen(self._fps, self._norms, self._flags, self._places, role)


class LastSeen:
    """A row for each tracked value, written by whoever looks."""

    __slots__ = ("_free", "columns", "flags", "fps", "norms")

    def __init__(self) -> None:
        self.columns = self.fps, self.norms, self.flags = array("Q"), array("d"), array("B")
        self._free: list[int] = []

    def place(self) -> int:
        """A row for a new value."""
        if self._free:
            at = self._free.pop()
            self.flags[at] = _NEVER
            return at
        self.fps.append(0)
        self.norms.append(0.0)
        self.flags.append(_NEVER)
        return len(self.flags) - 1

    def drop(self, *places: int) -> None:
        """Rows of values that are gone."""
        self._free += places

    def now(self, places: Places) -> Seen:
        """A copy, with the keys of its rows."""
        return Seen(self.fps.tobytes(), self.norms.tobytes(), self.flags.tobytes(), places)
