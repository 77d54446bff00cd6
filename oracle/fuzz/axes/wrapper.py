"""How the model is distributed: `wrapper`, whose values are the wrappers that the other files of this folder register."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, Rule, register, wrappers
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_FIRST = ("ddp", "fsdp2", "zero", "tp")


@register
class WrapperAxis(Axis):
    """None, or one of the library's wrappers."""

    order = 40

    def __init__(self) -> None:
        names = [n for n in _FIRST if n in wrappers()] + sorted(n for n in wrappers() if n not in _FIRST)
        self.choice = Choice("wrapper", ("none", *names))
        self.rules = (
            Rule("invalid", "without a wrapper there is nothing to distribute", when={"wrapper": ("none",)}, unless={"world": (1,)}),
        )

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return wrappers()[str(value)].invalid(setting, traits)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        wrappers()[str(value)].apply(draft, setting)
