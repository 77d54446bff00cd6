"""Whether what a function is given comes again: in the next call, or as the second half of the same tensor; and where its numbers, and those that objects hold, go. Used by `manners.py`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, Final

ANOTHER: Final = "it is another than in the call before"
_SOME: Final = 4  # calls that were given the same: fewer may be chance, or one batch that is used twice
CHANGES: Final = "it changes"
ONWARD: Final = "it does not begin anew"
_LOOKS: Final = (16, 24, 32, 40, 48, 56)  # calls after which it is told where a number has gone
_CHANGES: Final = 8  # fewer show no course
_HEAD: Final = 4  # values that come again, one behind the other: it began anew
_LAST: Final = 65_536  # calls of a function that are followed
_ARGUMENTS: Final = 8
_ATTRIBUTES: Final = 32
_HALVES: Final = {0: "its halves along the first dimension differ", 1: "its halves along the second dimension differ"}


class Repeats:
    """How often each argument of a function was the one of the call before."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int, int]] = {}  # fingerprint, calls, and those given the same as before

    def told(self, function: str, given: list[tuple[str, Any, int]], enough: int) -> Iterator[tuple[str, str, str, str]]:
        """Take what a call is given, `(name, tensor, fingerprint)`; behind so many calls: name, what is true, what is not, and what is left open.

        A tensor that came again now and then breaks no rule, and is none for which one holds: its numbers go by the data.
        """
        for name, tensor, fp in given:
            last, calls, same = self._seen.get((function, name), (0, 0, 0))
            calls, same = calls + 1, same + (calls > 0 and fp == last)
            self._seen[function, name] = fp, calls, same
            if calls >= enough and tensor.numel() > 1:
                yield name, "" if same else ANOTHER, ANOTHER if same >= _SOME else "", ANOTHER if 0 < same < _SOME else ""


def halves(data: Any, has: list[str], lacks: list[str], *, computed: bool) -> None:
    """Say of a tensor of varied numbers whether its second half is its first one again, as where one view is joined with itself.

    What is the same all along a dimension is no tensor that was joined: a model that collapsed gives such. Of two slices that is told of data alone, which nobody `computed`, and of
    what was joined or stacked just before: its samples have to differ.
    """
    for dim, word in _HALVES.items() if data.dim() > 1 else ():
        size = data.shape[dim]
        if size < 2 or size % 2 or (size == 2 and (computed or dim == 0)):
            continue
        first, second = data.chunk(2, dim)
        if not bool((first == second).all()):
            has.append(word)
        elif not bool((first == first.narrow(dim if size > 2 else 0, 0, 1)).all()):
            lacks.append(word)


def was_joined(tensor: Any) -> bool:
    """Whether autograd knows that a tensor was put together of others, and nothing was done to it since."""
    node = node_of(tensor)
    return node is not None and node.name().startswith(("CatBackward", "StackBackward"))


def node_of(tensor: Any) -> Any:
    """The node of the graph that made a tensor; None where there is none, or where torch tells none: of a view that is no part of a graph any more."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


class Numbers:
    """Floats that functions are given: whether they change, and do not come again from their first one on, as a weight would that is annealed in each epoch anew."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, _Number]] = {}
        self._calls: dict[str, int] = {}
        self._late = False

    def late(self) -> None:
        """Follow only those from now on that went on so far."""
        self._late = True
        gone_on = {function: {name: number for name, number in known.items() if number.told} for function, known in self._known.items()}
        self._known = {function: known for function, known in gone_on.items() if known}

    def follows(self) -> bool:
        """Whether there is anything to be told of."""
        return bool(self._known) or not self._late

    def told(self, function: str, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[tuple[str, str, str]]:
        """Take the floats of a call: name, what is true, what is not."""
        known = self._known.get(function)
        if known is None:
            if self._late:
                return
            known = self._known[function] = {}
        calls = self._calls[function] = self._calls.get(function, 0) + 1
        if calls > _LAST:
            del self._known[function]
            return
        pairs = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args[:_ARGUMENTS])]
        for name, value in [*pairs, *(kwargs or {}).items()]:
            if not isinstance(value, float) or value != value:  # numpy's are floats, too
                continue
            number = known.get(name)
            if number is None:
                if self._late or len(known) >= _ARGUMENTS:
                    continue
                number = known[name] = _Number(value)
            for has, lacks in number.meets(value, calls):
                yield name, has, lacks


class _Number:
    def __init__(self, value: float) -> None:
        self.last, self.head, self.changes = value, [value], 0
        self.again = 0  # of its first values, those that came again, one behind the other
        self.anew = self.told = False
        self.wanders = False  # its first values came again in another order: a number that is drawn out of a few, or counted, has no course

    def meets(self, value: float, calls: int) -> Iterator[tuple[str, str]]:
        if value != self.last:
            self.last, self.changes = value, self.changes + 1
            if not self.wanders and self._begins_anew(value) and self.told:
                self.told = False
                yield "", ONWARD
        if calls in _LOOKS:
            yield (CHANGES, "") if self.changes else ("", CHANGES)
            if self.changes >= _CHANGES and not self.wanders:
                self.told = not self.anew
                yield ("", ONWARD) if self.anew else (ONWARD, "")

    def _begins_anew(self, value: float) -> bool:
        """Whether this is the last of its first values to come again, in the same order."""
        expected = self.head[self.again]
        if value not in (expected, self.head[0]) and value in self.head and not self.anew:
            self.wanders, self.told = True, False
            return False
        self.again = self.again + 1 if value == expected else int(value == self.head[0])
        if len(self.head) < _HEAD:
            self.head.append(value)
        if self.again < _HEAD:
            return False
        self.anew, self.again = True, 0
        return True


class Held:
    """An object whose methods are called, and the floats that it held."""

    def __init__(self, thing: weakref.ref[Any], owner: str, numbers: dict[str, float]) -> None:
        self.thing, self.owner, self.numbers, self.calls = thing, owner, numbers, 0

    def changed(self, now: dict[str, float]) -> list[tuple[str, float, float]]:
        """Numbers that are not as they were; each is said once."""
        found = [(name, old, now[name]) for name, old in self.numbers.items() if name in now and now[name] != old]
        for name, _, _ in found:
            del self.numbers[name]
        return found


def numbers_of(thing: Any) -> dict[str, float]:
    """Finite floats that an object holds by a name of its own; nothing of the program runs for it."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    if type(held) is not dict:
        return {}
    return {name: value for name, value in list(held.items())[:_ATTRIBUTES] if type(value) is float and math.isfinite(value) and not name.startswith("_")}
