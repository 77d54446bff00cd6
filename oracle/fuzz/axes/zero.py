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


@register
class ZeroSaved(Axis):
    """The state is gathered on one rank after the first step (`consolidate_state_dict`), and a program that begins anew loads it: as it is, or by way of the optimizer whose state it is."""

    choice = Choice("zero_saved", ("no", "consolidated", "last rank", "by the local optimizer"), rare=0.3)
    order = 70
    rules = (
        Rule("invalid", "there is no ZeRO", unless={"zero_saved": ("no",), "wrapper": ("zero",)}),
        Rule("invalid", "the schedule would follow the optimizer from before", when={"scheduler": ("ExponentialLR", "OneCycleLR")}, unless={"zero_saved": ("no",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("import copy")
        to = "world - 1" if value == "last rank" else "0"
        local = [f"    local = {draft.local_optimizer}", "    local.load_state_dict(saved[0][1])", "    saved[0] = saved[0][0], local.state_dict()"]
        draft.after_step += [
            "if step == 0:",
            f"    opt.consolidate_state_dict(to={to})",
            f"    saved = [copy.deepcopy((net.state_dict(), opt.state_dict())) if rank == {to} else None]",
            f"    dist.broadcast_object_list(saved, {to})",
            "    net, opt = build(rank, world)",
            *(local if value == "by the local optimizer" else []),
            "    net.load_state_dict(saved[0][0]), opt.load_state_dict(saved[0][1])",
        ]
