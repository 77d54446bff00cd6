"""To which open incident a violation belongs: those that touch what it touches, as `incident.group` has it for a whole run.

One index holds, by what incidents touch, the first and the last step at which a rule that touches it began to fail.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from proctor.invariants.verdict import Violation
from proctor.verify.incident import Key, module_keys, own_keys
from proctor.verify.lifecycle.record import MAX_KEYS, TrackedIncident
from proctor.verify.wording import clean

_NEAR: Final = "near "  # what only violations within a step share
_STORM: Final = "storm"
_LONG: Final = 300  # characters of a name beyond which its hash will do


class Belonging:
    """Open incidents by what they touch."""

    def __init__(self) -> None:
        self._index: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def add(self, incident: TrackedIncident, keys: Iterable[str], at: int) -> None:
        """A violation that began at a step joined an incident: what it touches (`keys_of`) belongs to it from now on, at
        most `MAX_KEYS` names."""
        self._put(incident, keys, at, at)

    def storm(self, incident: TrackedIncident, step: int) -> None:
        """Whatever begins to fail within a step of this one belongs to it."""
        self._put(incident, [_STORM], step, step)

    def restore(self, incident: TrackedIncident) -> None:
        """An incident is open again, as it was."""
        for key, (first, last) in incident.keys.items():
            self._index[key][incident.number] = (first, last)

    def remove(self, incident: TrackedIncident) -> None:
        """An incident is over."""
        for key in incident.keys:
            held = self._index.get(key)
            if held is not None:
                held.pop(incident.number, None)
                if not held:
                    del self._index[key]

    def merge(self, into: TrackedIncident, other: TrackedIncident) -> None:
        """What one incident touches belongs to another."""
        self.remove(other)
        for key, (first, last) in other.keys.items():
            self._put(into, [key], first, last)

    def find(self, keys: Iterable[str], at: int, partners: Iterable[str] = ()) -> set[int]:
        """Numbers of the open incidents that a violation belongs to.

        Args:
            keys: what it touches (`keys_of`).
            at: the step at which it began.
            partners: functions that call its function, or that it calls.
        """
        found = set(self._near(_STORM, at))
        for key in keys:
            found |= set(self._near(key, at) if key.startswith(_NEAR) else self._index.get(key, ()))
        for function in partners:
            found |= set(self._near(_text(("function", function)), at))
        return found

    def _near(self, key: str, at: int) -> Iterator[int]:
        for number, (first, last) in self._index.get(key, {}).items():
            if first - 1 <= at <= last + 1:
                yield number

    def _put(self, incident: TrackedIncident, keys: Iterable[str], first: int, last: int) -> None:
        for key in keys:
            held = incident.keys.get(key)
            if held is None and len(incident.keys) >= MAX_KEYS and key != _STORM:
                continue
            span = (first, last) if held is None else (min(first, held[0]), max(last, held[1]))
            incident.keys[key] = self._index[key][incident.number] = span


def keys_of(v: Violation, ranks: int) -> list[str]:
    """What a violation touches, in texts of bounded length."""
    own = own_keys(v, ranks)
    # Ranks that were held against others deviate for good. That something failed on rank 0 alone means little later on:
    # rank 0 does what the others do not, and stands for all of them where a rule does not tell which one is to blame.
    near = {key for key in own if key[0] == "module" or (key[0] == "ranks" and not v.sides)} | module_keys(v)
    tight = {key for key in own if v.sides or key[0] != "ranks"}
    return sorted([*map(_text, tight), *(_NEAR + _text(key) for key in near)])


def _text(key: Key) -> str:
    kind, what = key
    text = clean(f"{kind} {','.join(map(str, sorted(what))) if isinstance(what, frozenset) else what}")
    return text if len(text) <= _LONG else f"{kind} #{hashlib.sha256(text.encode()).hexdigest()}"
