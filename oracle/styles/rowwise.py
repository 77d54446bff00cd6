"""A linear layer whose inputs are cut: every rank's output is an addend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.oracle.plans.rules import ParamRule
from proctor.oracle.styles import register

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan


@register("rowwise")
def rowwise(
    plan: Plan, module: str, axis: str, *, sequence: int | None = None, bias: bool = True, transposed: bool = False
) -> None:
    """Weight cut along inputs, outputs added up; the bias is added once, after that.

    Args:
        plan: gets the rules.
        module: regex on the path.
        axis: of tensor parallelism.
        sequence: the dimension in which the output is cut (sequence parallelism); None for a whole output.
        bias: whether the layer has one.
        transposed: whether the weight is [inputs, outputs], as transformers' Conv1D has it.
    """
    leaves: dict[str, int | str] = {} if sequence is None else {axis: sequence}
    plan.add(ParamRule(rf"{module}\.weight", plan.rule({axis: 0 if transposed else 1})))
    plan.redistribute(module, at="output", src={axis: "partial"}, dst=leaves, after="bias" if bias else "")
    if bias:
        plan.replicate(rf"{module}\.bias")
        if sequence is not None:
            plan.pending(rf"{module}\.bias", axis)
