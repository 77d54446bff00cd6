"""`ZeroRedundancyOptimizer` beside DDP: each rank updates a part of the parameters and sends it to the others."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.axes import Axis, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.ddp import wrap
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value


@register_wrapper
class Zero(Wrapper):
    """DDP, with the optimizer's state cut."""

    name: ClassVar[str] = "zero"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "ZeRO needs an optimizer that works parameter by parameter", when={"wrapper": ("zero",), "optimizer": ("LBFGS",)}),
        Rule("invalid", "ZeRO documents that it takes no names", when={"wrapper": ("zero",), "groups": ("named",)}),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        wrap(draft, setting)
        draft.add_import("from torch.distributed.optim import ZeroRedundancyOptimizer")
        view = ", parameters_as_bucket_view=True" if setting["zero_view"] else ""
        options = "".join(f", {k}={v}" for k, v in draft.options.items())
        draft.opt = f"ZeroRedundancyOptimizer({draft.net_args}, {draft.optimizer}{view}{options})"


@register
class ZeroView(Axis):
    """`parameters_as_bucket_view`."""

    choice = Choice("zero_view", (False, True))
    order = 35
    rules = (Rule("invalid", "there is no ZeRO", when={"zero_view": (True,)}, unless={"wrapper": ("zero",)}),)

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""
