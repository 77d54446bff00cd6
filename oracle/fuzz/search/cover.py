"""Which settings are tried: rows that hold pairs of values which no row held before.

Two values of two axes make a pair; most bugs need one or two (D3, table III). Rows are drawn by chance, repaired until they are programs, and the one
with most new pairs for its time (its ranks, and what its values cost) is taken (the greedy part of AETG, Cohen et al. 1997). What was held is remembered across models: a row of
all axes would otherwise need hundreds of rows for each. One candidate of each row is drawn around the value that was held least: a switch with its
wrapper and its model is rare by chance, and a bug behind it would wait for dozens of rows. Rows of one model share a few programs (`programs`), since each needs a reference of its own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Final

from proctor.oracle.fuzz.axes import Axis, OfWrapper, axes_for, why_invalid, wrappers
from proctor.oracle.fuzz.search.attribute import OPTIMIZERS
from proctor.oracle.fuzz.space import Point, Value

CANDIDATES: Final = 8  # drawn for each row
MOST: Final = 4  # axes of a row that are not neutral, besides its program, world and wrapper: one failure hides others
PROGRAM: Final = 2  # axes of a program that are not neutral, besides the optimizer
USUAL: Final = 0.5  # of the rows of a wrapper that names values which most of its rows should have
FRESH: Final = 2.0  # what a value that no row held is worth, in pairs
ASKED: Final = 1e6  # more than any row is worth
COST: Final = {1: 1.5, 2: 2.0, 3: 3.0, 4: 4.0}  # of a row, by its ranks

Pair = tuple[str, str, str, str]


class Cover:
    """Pairs that have been held, and rows that hold others."""

    def __init__(self, libraries: tuple[str, ...] = ("torch",), only: dict[str, tuple[str, ...]] | None = None, around: tuple[str, ...] = ()) -> None:
        self.axes = axes_for(libraries)
        self.libraries = libraries
        self.held: dict[Pair, int] = {}
        self.values: Counter[tuple[str, str]] = Counter()  # of an axis, so often
        self._by_name = {a.name: a for a in self.axes}
        self._around_these = tuple(one for one in around if not self._of_program(one))  # "axis" or "axis=value"; every row is drawn around one of them
        self._around_programs = [(a.name, v) for one in around if self._of_program(one) for a in (self._by_name[one.partition("=")[0]],) for v in a.choice.values[1:] if one in (a.name, f"{a.name}={v}")]
        self._wrappers: dict[frozenset[str], tuple[Value, ...]] = {}
        ours = tuple(n for n, w in wrappers().items() if w.library in libraries)
        if all(wrappers()[n].besides for n in ours):
            ours += tuple(n for n, w in wrappers().items() if w.library == "torch")
        asked = [{**point, "wrapper": name, "world": 2} for name in ours for point in wrappers()[name].asks]
        self._asked: list[Point] = asked if all(wrappers()[name].asks for name in ours) else [{}]
        self._only = {"wrapper": ours, **(only or {})}
        self._for_programs, self._repairs = (
            tuple(more for more in repairs if all(name in self._by_name and self._allows(name, value) for name, value in more.items())) for repairs in (FOR_PROGRAMS, FOR_ROWS)
        )
        self._optimizer = next(a.name for a in self.axes if a.name in OPTIMIZERS)

    def programs(self, rng: random.Random, traits: frozenset[str], number: int) -> list[Point]:
        """Programs for the rows of one model: an optimizer and a little more; each can be trained by one process.

        Where all wrappers of a library ask for something, programs are such that one of them fits.

        Args:
            rng: chance.
            traits: of the model.
            number: of programs; the first is the simplest one, equal ones are drawn again.
        """
        bases = [_repaired(point, traits, self._for_programs) or {} for point in self._asked]
        found: list[Point] = [_unwrapped(bases[0])]
        for _ in range(8 * number):
            if len(found) >= number:
                break
            point = rng.choice(bases) if len(bases) > 1 else bases[0]
            if self._around_programs:
                name, value = rng.choice(self._around_programs)
                point = _repaired({**point, name: value}, traits, self._for_programs) or point
            point = self._more(point, [self._optimizer], rng, traits, 1, self._for_programs)
            names = [a.name for a in self.axes if a.program and a.name != self._optimizer]
            point = self._more(point, rng.sample(names, len(names)), rng, traits, rng.randint(0, PROGRAM), self._for_programs)
            if _unwrapped(point) not in found and self._fits(point, traits):
                found.append(_unwrapped(point))
        return found

    def _of_program(self, one: str) -> bool:
        axis = self._by_name.get(one.partition("=")[0])
        return axis is not None and axis.program

    def _fits(self, program: Point, traits: frozenset[str]) -> bool:
        """Whether a wrapper is found for a program: a library's own training loop has one form alone."""
        return any(_repaired({**program, "world": n, "wrapper": wrapper}, traits, self._repairs) is not None for wrapper in self._fitting(traits) for n in (2, 4))

    def takes(self, traits: frozenset[str]) -> bool:
        """Whether a wrapper takes a model, where all wrappers of the library ask for something; without that every model is drawn.

        Args:
            traits: of the model, and facts.
        """
        return not any(self._asked) or ("trains" in traits and any(_repaired(point, traits, self._for_programs) is not None for point in self._asked))

    def row(self, rng: random.Random, traits: frozenset[str], passed: Callable[[Point], bool] = lambda _: False, program: Point | None = None) -> Point:
        """The next setting.

        Args:
            rng: chance.
            traits: of the model.
            passed: settings that are known to fail; another is drawn.
            program: values of program axes; None to draw them, too.
        """
        best, most = {}, -math.inf
        for number in range(CANDIDATES):
            given = self.programs(rng, traits, 2)[-1] if program is None else program
            point = self._drawn(rng, traits, given) if number and not self._around_these else self._around(rng, traits, given)
            fresh = FRESH * sum(one not in self.values for one in _values(point))
            new = fresh + sum(1.0 / (1 + self.held.get(p, 0)) for p in pairs(point)) / self.cost(point)
            if not any(self._wanted(*one) for one in point.items()):
                new -= ASKED  # what every row is to be drawn around did not fit its program
            if new > most:
                if passed(point):
                    self.hold(point)  # else what is known to fail would look new for ever
                else:
                    best, most = point, new
        self.hold(best)
        return best

    def cost(self, point: Point) -> float:
        """Of a row: a checkpoint on disk, or a compiled model, takes the time of several other rows."""
        return COST[int(str(point.get("world", 1)))] * (1.0 + sum(self._by_name[name].cost(value) for name, value in point.items()))

    def hold(self, point: Point) -> None:
        """Remember that a row was tried."""
        for pair in pairs(point):
            self.held[pair] = self.held.get(pair, 0) + 1
        self.values.update(_values(point))

    def _around(self, rng: random.Random, traits: frozenset[str], program: Point) -> Point:
        """A valid setting with the value that was held least, if a wrapper is found for it; it counts as held then, so that the next row has another."""
        fitting = set(self._fitting(traits))
        mine = [a for a in self.axes if not a.program and (not isinstance(a, OfWrapper) or fitting & set(a.of))] or [a for a in self.axes if not a.program]
        every = [(a.name, v, str(v)) for a in mine for v in a.choice.values if v != a.choice.neutral and self._allows(a.name, v)]
        free = [(name, text) for name, v, text in every if self._wanted(name, v)] or [(name, text) for name, _, text in every]
        least = min(self.values[one] for one in free)
        name, text = rng.choice([one for one in free if self.values[one] == least])
        self.values[name, text] += 1
        value = next(v for v in self._by_name[name].choice.values if str(v) == text)
        return self._drawn(rng, traits, program, {name: value})

    def _wanted(self, axis: str, value: Value) -> bool:
        """Whether a value is one that rows are to be drawn around; all are where nothing is asked for."""
        return not self._around_these or axis in self._around_these or f"{axis}={value}" in self._around_these

    def _drawn(self, rng: random.Random, traits: frozenset[str], program: Point, wanted: Point | None = None) -> Point:
        """A valid setting by chance: axes are set one after the other, and left neutral where a value does not fit; what is wanted is tried first."""
        point = dict(program)
        fitting = self._fitting(traits)
        for number in range(64 if wanted else 16):
            drawn = {**program, **(wanted or {})} if number < 48 else dict(program)
            self._set(drawn, self._by_name["world"], rng)
            drawn.setdefault("wrapper", rng.choice(fitting))
            repaired = _repaired(drawn, traits, self._repairs)
            if repaired is not None:
                point = repaired
                break
        names = [a.name for a in self.axes if not a.program and a.name not in ("world", "wrapper")]
        point = self._more(point, rng.sample(names, len(names)), rng, traits, rng.randint(0, MOST), self._repairs)
        usual = wrappers()[str(point["wrapper"])].usual if "wrapper" in point else {}
        more = {**usual, **point} if usual and rng.random() < USUAL else point
        return point if why_invalid(more, traits) else more

    def _fitting(self, traits: frozenset[str]) -> tuple[Value, ...]:
        """Wrappers that go with a model on some number of ranks: a model of one operator has one of its own."""
        if traits not in self._wrappers:
            named = [v for v in self._by_name["wrapper"].choice.values[1:] if self._allows("wrapper", v)]
            found = [v for v in named if any(_repaired({"world": n, "wrapper": v}, traits, (*self._repairs, *self._for_programs)) for n in (2, 4))]
            self._wrappers[traits] = tuple(found or named)
        return self._wrappers[traits]

    def _more(self, point: Point, names: list[str], rng: random.Random, traits: frozenset[str], left: int, repairs: tuple[Point, ...]) -> Point:
        """A valid point with values of `left` more axes, if there are as many that fit."""
        for name in names:
            if left == 0:
                break
            if name in point:
                continue
            more = dict(point)
            self._set(more, self._by_name[name], rng)
            repaired = _repaired(more, traits, repairs) if more != point else None
            if repaired is not None:
                point, left = repaired, left - 1
        return point

    def _set(self, point: Point, axis: Axis, rng: random.Random) -> None:
        value = axis.choice.draw(rng)
        if axis.name not in point and value != axis.choice.neutral and self._allows(axis.name, value):
            point[axis.name] = value

    def _allows(self, axis: str, value: Value) -> bool:
        allowed = self._only.get(axis)
        return allowed is None or str(value) in allowed


# What some values ask for: of a program, and of how it is distributed.
FOR_PROGRAMS: Final[tuple[Point, ...]] = ({}, {"groups": "matrices"}, {"groups": "bags"}, {"precision": "float32"})
FOR_ROWS: Final[tuple[Point, ...]] = (
    {},
    {"world": 4},
    {"fsdp_set": "set_reduce_scatter_unused_params(True)"},
    {"ddp": "find_unused_parameters=True"},
    {"acc_ddp": "find_unused_parameters=True"},
    {"accumulate": 2},
    {"fsdp_units": "each"},
    {"disk": "save"},
    {"disk": "flat"},
    {"ds_state": "universal"},
    {"pipe_micro": "two a rank"},
)


def _repaired(point: Point, traits: frozenset[str], repairs: tuple[Point, ...]) -> Point | None:
    """The same with what makes it a program; None if nothing does."""
    return next((fixed for more in repairs if not why_invalid(fixed := {**point, **more}, traits)), None)


def _unwrapped(point: Point) -> Point:
    return {name: value for name, value in point.items() if name not in ("wrapper", "world")}


def _values(point: Point) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in point.items()]


def pairs(point: Point) -> Iterator[Pair]:
    """Pairs of values that a row holds."""
    named = sorted((name, str(value)) for name, value in point.items())
    for (a, x), (b, y) in combinations(named, 2):
        yield a, x, b, y
