"""Which settings are tried: rows that hold pairs of values which no row held before.

Two values of two axes make a pair; most bugs need one or two (D3, table III). Rows are drawn by chance, repaired until they are programs, and the one
with most new pairs is taken (the greedy part of AETG, Cohen et al. 1997). What was held is remembered across models: a row of
all axes would otherwise need hundreds of rows for each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Final

from proctor.oracle.fuzz.axes import Axis, all_axes, why_invalid
from proctor.oracle.fuzz.space import Point

CANDIDATES: Final = 8  # drawn for each row
MOST: Final = 5  # axes of a row that are not neutral, besides world, wrapper and optimizer: one failure hides others
ALWAYS: Final = ("world", "wrapper", "optimizer")

Pair = tuple[str, str, str, str]


class Cover:
    """Pairs that have been held, and rows that hold others."""

    def __init__(self, libraries: tuple[str, ...] = ("torch",), only: dict[str, tuple[str, ...]] | None = None) -> None:
        self.axes = all_axes(libraries)
        self.libraries = libraries
        self.held: dict[Pair, int] = {}
        self._only = only or {}

    def row(self, rng: random.Random, traits: frozenset[str], passed: Callable[[Point], bool] = lambda _: False) -> Point:
        """The next setting.

        Args:
            rng: chance.
            traits: of the model.
            passed: settings that are known to fail; another is drawn.
        """
        best, most = {}, -1.0
        for _ in range(CANDIDATES):
            point = self._drawn(rng, traits)
            new = sum(1.0 / (1 + self.held.get(p, 0)) for p in pairs(point))
            if new > most and not passed(point):
                best, most = point, new
        for pair in pairs(best):
            self.held[pair] = self.held.get(pair, 0) + 1
        return best

    def _drawn(self, rng: random.Random, traits: frozenset[str]) -> Point:
        """A valid setting by chance: axes are set one after the other, and left neutral where a value does not fit."""
        by_name = {a.name: a for a in self.axes}
        point: Point = {}
        for _ in range(16):
            point = {}
            for name in ALWAYS:
                self._set(point, by_name[name], rng)
            if not self._blocks(point, traits):
                break
        others = [a for a in self.axes if a.name not in ALWAYS]
        rng.shuffle(others)
        left = rng.randint(0, MOST)
        for axis in others:
            if left == 0:
                break
            before = dict(point)
            self._set(point, axis, rng)
            if point == before:
                continue
            if why_invalid(point, traits):
                point = before
            else:
                left -= 1
        return point if not why_invalid(point, traits) else self._repaired(point, traits)

    def _set(self, point: Point, axis: Axis, rng: random.Random) -> None:
        value = axis.choice.draw(rng)
        allowed = self._only.get(axis.name)
        if value != axis.choice.neutral and (allowed is None or str(value) in allowed):
            point[axis.name] = value

    def _blocks(self, point: Point, traits: frozenset[str]) -> bool:
        """Whether no further axis can make a program of it."""
        return bool(why_invalid(point, traits)) and not self._repaired(point, traits).get("wrapper")

    def _repaired(self, point: Point, traits: frozenset[str]) -> Point:
        """The same with what makes it a program: what an optimizer or a wrapper needs, or without what cannot be."""
        for more in REPAIRS:
            fixed = {**point, **more}
            if not why_invalid(fixed, traits):
                return fixed
        for name in ("optimizer", "wrapper", "world"):
            fixed = {k: v for k, v in point.items() if k != name}
            if not why_invalid(fixed, traits):
                return fixed
        return {}


# What some values ask for.
REPAIRS: Final[tuple[Point, ...]] = (
    {},
    {"groups": "matrices"},
    {"world": 4},
    {"world": 4, "groups": "matrices"},
    {"groups": "bags"},
    {"fsdp_set": "set_reduce_scatter_unused_params(True)"},
    {"ddp": "find_unused_parameters=True"},
    {"ddp": "find_unused_parameters=True", "groups": "matrices"},
)


def pairs(point: Point) -> Iterator[Pair]:
    """Pairs of values that a row holds."""
    named = sorted((name, str(value)) for name, value in point.items())
    for (a, x), (b, y) in combinations(named, 2):
        yield a, x, b, y
