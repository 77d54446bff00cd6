"""A linear layer whose outputs are cut: every rank computes some of them from the whole input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.oracle.plans.rules import ParamRule
from proctor.oracle.styles import register

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan


@register("colwise")
def colwise(
    plan: Plan, module: str, axis: str, *, sequence: int | None = None, gather: bool = False, blocks: int | str = 1, transposed: bool = False
) -> None:
    """Weight and bias cut along outputs; the input's gradient is an addend on every rank.

    Args:
        plan: gets the rules.
        module: regex on the path.
        axis: of tensor parallelism.
        sequence: the dimension in which the input comes cut (sequence parallelism); None for a whole input.
        gather: whether the output is put together again, along its last dimension.
        blocks: fused projections one after the other (3 for query, key and value, or their sizes in proportion, "[4,2,2]"):
            each is cut.
        transposed: whether the weight is [inputs, outputs], as transformers' Conv1D has it.
    """
    arrives: dict[str, int | str] = {} if sequence is None else {axis: sequence}
    for name, dim in (("weight", 1 if transposed else 0), ("bias", 0)):
        how = dim if blocks == 1 else f"interleaved:{dim}:{blocks}"
        plan.add(ParamRule(rf"{module}\.{name}", plan.rule({axis: how})))
    plan.redistribute(module, at="input", src=arrives, dst={}, grad_src={axis: "partial"}, grad_dst=arrives)
    if gather:
        plan.redistribute(module, at="output", src={axis: -1 if blocks == 1 else f"interleaved:-1:{blocks}"}, dst={})
