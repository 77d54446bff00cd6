"""Data parallelism: every rank computes some rows of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.oracle.styles import register

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan


@register("batch")
def batch(plan: Plan, module: str, axis: str, *, dim: int = 0, output: str = "gather", slot: str = ".*") -> None:
    """Inputs are cut along the batch, gradients of all parameters pending.

    Args:
        plan: gets the rules.
        module: regex on the path; "" for the model.
        axis: of data parallelism.
        dim: of the batch.
        output: "gather" puts outputs together, "mean" averages them over the axis (a loss), "local" leaves them.
        slot: which inputs.
    """
    plan.redistribute(module, at="input", dst={axis: dim}, slot=slot)
    if output != "local":
        plan.redistribute(module, at="output", src={axis: dim if output == "gather" else "partial-avg"})
    plan.pending(".*", axis)
