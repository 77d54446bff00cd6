"""Precision of parameters and of the forward pass. The reference has the same; what it rounds away is its noise."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value


@register
class Precision(Axis):
    """Double, where mistakes stand ten orders above rounding; single; or bfloat16 in the forward pass."""

    program = True
    choice = Choice("precision", ("float64", "float32", "autocast"), rare=0.25)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.dtype = "torch.float32"
        if value == "autocast":
            draft.contexts.append("torch.autocast('cpu', torch.bfloat16)")
