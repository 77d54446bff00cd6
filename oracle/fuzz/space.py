"""Finite spaces of ordered values: what models, inputs and settings are drawn from, checked against, and shrunk in.

A template and an axis declare `Choice`s. The first value of a choice is the simplest one: shrinking goes to it, and a
point of a space leaves it out. So an empty point is the simplest, and two points that mean the same are equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from proctor.errors import OracleError

Value = str | int | float | bool | list[str]
Point = dict[str, Value]


class Choice(msgspec.Struct, frozen=True):
    """One thing that varies.

    Attributes:
        name: of the key in a point.
        values: simplest first.
        most: 0 for one value; else the value is a list of strings of `values`, with so many entries at most.
        rare: how often a value other than the first is drawn, 0 to 1; 1 draws all values alike.
        kept: shrinking leaves it: with another value it would be another finding.
    """

    name: str
    values: tuple[str | int | float | bool, ...]
    most: int = 0
    rare: float = 1.0
    kept: bool = False

    @property
    def neutral(self) -> Value:
        """The simplest value."""
        return [str(self.values[0])] if self.most else self.values[0]

    def draw(self, rng: random.Random) -> Value:
        """A value by chance."""
        if self.most:
            return [str(rng.choice(self.values)) for _ in range(rng.randint(1, self.most))]
        if len(self.values) > 1 and rng.random() >= self.rare:
            return self.values[0]
        return rng.choice(self.values)

    def holds(self, value: object) -> bool:
        """Whether it is a value of this choice; `True` is not `1`."""
        if self.most:
            return isinstance(value, list) and 1 <= len(value) <= self.most and all(v in self.values for v in value)
        return any(type(v) is type(value) and v == value for v in self.values)

    def simpler(self, value: Value) -> Iterator[Value]:
        """Values that are simpler than this one, the simplest first."""
        if isinstance(value, list):
            yield from _shorter(value, str(self.values[0]))
            return
        yield from self.values[: _index(self.values, value)]


def _index(values: Sequence[object], value: object) -> int:
    return next((i for i, v in enumerate(values) if type(v) is type(value) and v == value), 0)


def _shorter(value: list[str], simplest: str) -> Iterator[list[str]]:
    half = len(value) // 2
    if half:
        yield value[:half]
        yield value[half:]
    for i in range(len(value)):
        if len(value) > 1:
            yield value[:i] + value[i + 1 :]
    for i, one in enumerate(value):
        if one != simplest:
            yield [*value[:i], simplest, *value[i + 1 :]]


def drawn(choices: Sequence[Choice], rng: random.Random) -> Point:
    """A point by chance."""
    return compact(choices, {c.name: c.draw(rng) for c in choices})


def compact(choices: Sequence[Choice], point: Mapping[str, Value]) -> Point:
    """The same point without what is neutral, in the order of the choices."""
    return {c.name: point[c.name] for c in choices if c.name in point and point[c.name] != c.neutral}


def full(choices: Sequence[Choice], point: Mapping[str, Value]) -> Point:
    """The same point with every value."""
    return {c.name: point.get(c.name, c.neutral) for c in choices}


def check(choices: Sequence[Choice], point: Mapping[str, Value], where: str) -> None:
    """See that a point lies in a space.

    Raises:
        OracleError: a name is unknown, or a value is none of its values.
    """
    known = {c.name: c for c in choices}
    for name, value in point.items():
        if name not in known:
            raise OracleError(f"{where}: there is no {name!r}", hint=f"known: {', '.join(sorted(known)) or 'none'}")
        if not known[name].holds(value):
            values = ", ".join(map(repr, known[name].values[:12]))
            raise OracleError(f"{where}: {name} is {value!r}", hint=f"values: {values}")


def simpler(choices: Sequence[Choice], point: Mapping[str, Value]) -> Iterator[Point]:
    """Points in which one value is simpler; all neutral first, then each choice by itself."""
    kept = {c.name: point[c.name] for c in choices if c.kept and c.name in point}
    if len(point) > 1 and kept != point:
        yield kept
    for choice in choices:
        if choice.name in point and not choice.kept:
            for value in choice.simpler(point[choice.name]):
                yield compact(choices, {**point, choice.name: value})
