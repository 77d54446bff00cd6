"""An embedding whose rows are cut: a token's row lies on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.oracle.plans.rules import ParamRule
from proctor.oracle.styles import register

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan


@register("vocab")
def vocab(plan: Plan, module: str, axis: str, *, sequence: int | None = None) -> None:
    """Every rank looks its own tokens up and gives zeros for the others; outputs are added up.

    Args:
        plan: gets the rules.
        module: regex on the path.
        axis: of tensor parallelism.
        sequence: the dimension in which the output is cut (sequence parallelism); None for a whole output.
    """
    plan.add(ParamRule(rf"{module}\.weight", plan.rule({axis: 0})))
    leaves: dict[str, int | str] = {} if sequence is None else {axis: sequence}
    plan.redistribute(module, at="input", lookup=axis)
    plan.redistribute(module, at="output", src={axis: "partial"}, dst=leaves)
