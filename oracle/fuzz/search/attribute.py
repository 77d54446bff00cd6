"""Which part of a setting makes it fail: the smallest set of axes that fails by itself.

From the failing setting towards the reference's, axes are set back one after the other; what still fails without one does not need it. The result is minimal: no
axis of it can be set back. One axis is what D3 calls a trigger; two or more are an interaction. Costs at most two runs for each axis, and one for a wrapper with its switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from proctor.oracle.fuzz.axes import axis_of, program_of, why_invalid
from proctor.oracle.fuzz.space import Point

Fails = Callable[[Point], bool]
TWINS: Final = {"ddp_also": "ddp"}  # a second axis of the same values: alone it is the first one
OPTIMIZERS: Final = ("optimizer", "keras_optimizer")  # axes that name the optimizer
LAST: Final = (*OPTIMIZERS, "wrapper", "world")  # what other axes hang on is set back last


def minimal(setting: Point, fails: Fails, traits: frozenset[str] = frozenset()) -> Point:
    """The smallest part of a setting that fails.

    Args:
        setting: that fails.
        fails: whether another one fails in the same way; settings that are no program do not fail.
        traits: of the model, and facts: what is a program for it.
    """
    point = dict(setting)
    again = True
    while again:
        again = False
        for name in _order(point):
            if name not in point:
                continue
            for less in without(point, name, traits):
                if fails(less):
                    point, again = less, True
                    break
    return point


def without(point: Point, name: str, traits: frozenset[str] = frozenset()) -> Iterator[Point]:
    """A setting without an axis; for the wrapper, without what is nothing without it, too; for the world, with fewer ranks; then with a simpler value."""
    rest = {k: v for k, v in point.items() if k != name}
    yield rest
    if name == "wrapper":  # a switch that the wrapper needs for this model cannot be set back before it, nor the wrapper before its switch
        program = program_of(rest)
        alone = {k: v for k, v in rest.items() if k in program or not why_invalid({**program, k: v}, traits)}
        if alone != rest:
            yield alone
    if name in TWINS and TWINS[name] not in point:
        yield {**rest, TWINS[name]: point[name]}
    values = axis_of(name).choice.values
    if name == "world":
        yield from ({**point, name: v} for v in values[1 : values.index(point[name])] if v != point[name])


def _order(point: Point) -> list[str]:
    return sorted(point, key=lambda n: (LAST.index(n) if n in LAST else -1, n))


def triggers(point: Point) -> tuple[str, ...]:
    """A minimal setting as words, the number of ranks as "more than one"."""
    return tuple(f"{k}={v}" if k != "world" else "world>1" for k, v in sorted(point.items()))
