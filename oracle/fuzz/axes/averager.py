"""Local SGD (`torch.distributed.algorithms.model_averaging`): an optimizer that averages parameters over ranks.

Gradients are reduced as ever, so the averages are of equal numbers and change nothing; what is looked at is what stands around them.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import Axis, Rule, not_of_calls, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_AVERAGERS: Final = "torch.distributed.algorithms.model_averaging"
_PERIODIC: Final = ("averagers", "PeriodicModelAverager")
_HIERARCHICAL: Final = ("hierarchical_model_averager", "HierarchicalModelAverager")
# Value → where the class is, and its arguments.
_KINDS: Final[dict[str, tuple[tuple[str, str], str]]] = {
    "each step": (_PERIODIC, "period=1, warmup_steps=0"),
    "every other step": (_PERIODIC, "period=2, warmup_steps=1"),
    "hierarchical": (_HIERARCHICAL, "period_group_size_dict=OrderedDict([(1, 2), (2, 4)]), warmup_steps=0"),
}
_OFF: Final[dict[str, tuple[Value, ...]]] = {"averager": ("no",)}


@register
class Averager(Axis):
    """`PostLocalSGDOptimizer` around the optimizer, with one of the averagers."""

    choice = Choice("averager", ("no", *_KINDS), rare=0.1)
    order: ClassVar[int] = 46
    rules = (
        Rule("invalid", "parameters are averaged that each rank has whole", unless={**_OFF, "wrapper": ("ddp",)}),
        Rule("invalid", "groups of two of four ranks", when={"averager": ("hierarchical",)}, unless={"world": (4,)}),
        Rule("invalid", "its step takes no closure", when={"optimizer": ("LBFGS",)}, unless=_OFF),
        Rule("invalid", "it is no optimizer of torch's distributed checkpoints", unless={**_OFF, "resume": ("no", "plain")}),
        Rule("invalid", "it is no optimizer of torch's distributed checkpoints", unless={**_OFF, "disk": ("no",)}),
        Rule("different", "ranks that do not reduce gradients average parameters instead", when={"ddp_hook": ("NOOP",)}, unless=_OFF),
        *not_of_calls(_OFF),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        (module, name), arguments = _KINDS[str(value)]
        draft.add_import("from torch.distributed.optim import PostLocalSGDOptimizer")
        draft.add_import(f"from {_AVERAGERS}.{module} import {name}")
        if name == _HIERARCHICAL[1]:
            draft.add_import("from collections import OrderedDict")
        draft.after_build.append(f"opt = PostLocalSGDOptimizer(opt, {name}({arguments}))")


@register
class LocalHook(Axis):
    """`post_localSGD_hook`: gradients are reduced over all ranks, then over a subgroup, which is all ranks here."""

    choice = Choice("local_hook", ("no", "0", "2", "9"), rare=0.1)
    order: ClassVar[int] = 45
    rules = (
        Rule("invalid", "there is no DDP", unless={"local_hook": ("no",), "wrapper": ("ddp", "zero")}),
        Rule("invalid", "DDP takes one hook", unless={"local_hook": ("no",), "ddp_hook": ("",)}),
        *not_of_calls({"local_hook": ("no",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`; the value is the step at which the subgroup takes over."""
        draft.add_import("from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook")
        draft.wrap.append(f"net.register_comm_hook(PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter={value}), post_localSGD_hook)")
