"""A layer that works on a part of the sequence (a norm): its parameters are whole, their gradients addends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.oracle.styles import register

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan


@register("sequence")
def sequence(plan: Plan, module: str, axis: str) -> None:
    """Parameters of the modules are replicated, gradients pending over the axis.

    Args:
        plan: gets the rules.
        module: regex on the path.
        axis: that cuts the sequence.
    """
    plan.replicate(rf"{module}\.(weight|bias)").pending(rf"{module}\.(weight|bias)", axis)
