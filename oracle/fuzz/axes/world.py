"""Number of ranks."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.loop import alone
from proctor.oracle.fuzz.space import Choice, Point, Value


@register
class World(Axis):
    """1, 2, 3 and 4: one that nothing divides by, one that is odd, one that is square."""

    choice = Choice("world", (1, 2, 3, 4))
    order = 10

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return alone(setting, traits)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: a world of that size runs the program."""
