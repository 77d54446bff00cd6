"""A `GradScaler` around loss and update: gradients are a multiple of what they are until it divides them, and a step whose gradients are not finite is left out on all ranks.

Factors are powers of two, so that nothing is rounded by them. In a step that overflows the last parameter's gradients are made infinite: of a parameter that is cut, a rank with no part of it has
nothing that is not finite, and must leave the step out all the same.
"""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import Axis, Rule, not_of_calls, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.form import WRAPPERS
from proctor.oracle.fuzz.axes.tensor_parallel import WRAPPERS as CUT
from proctor.oracle.fuzz.space import Choice, Point, Value

_ON: Final = ("scales", "unscales", "overflows")
_OFF: Final[dict[str, tuple[Value, ...]]] = {"scaler": ("no",)}
# The last parameter's, where this rank has a part of it.
_OVERFLOW: Final = ("big = opt.param_groups[-1]['params'][-1].grad", "if step == 1 and big is not None: big.mul_(float('inf'))")


@register
class Scaler(Axis):
    """The scale doubles in each step; gradients are divided by the update, or before they are clipped; the second step overflows."""

    program = True
    order = 95  # the last: what a form makes of the backward pass is scaled, too
    choice = Choice("scaler", ("no", *_ON), rare=0.1)
    rules = (
        Rule("invalid", "the wrapper has a training loop of its own", unless={**_OFF, "wrapper": WRAPPERS}),
        Rule("invalid", "a scaler takes no closure, and says so", when={"optimizer": ("LBFGS",)}, unless=_OFF),
        Rule("invalid", "the factor is no part of a checkpoint of model and optimizer", unless={**_OFF, "before": ("same",)}),
        Rule("invalid", "the factor is no part of a checkpoint of model and optimizer", unless={**_OFF, "before_world": (0,)}),
        Rule("invalid", "one call over parameters of which only some are cut, which the library refuses", when={"wrapper": CUT}, unless=_OFF, lacks=frozenset({"wholly cut"})),
        Rule("invalid", "one call over parameters on meshes of one and of two dimensions, which the library refuses", when={"wrapper": ("tp_fsdp2",)}, unless=_OFF),
        *not_of_calls(_OFF),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`; FSDP1 has a scaler of its own."""
        sharded = setting["wrapper"] == "fsdp1"
        if sharded:
            draft.add_import("from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler")
        made = "ShardedGradScaler" if sharded else "torch.amp.GradScaler"
        draft.before_loop.append(f"scaler = {made}('cpu', init_scale=1024.0, growth_interval=1)")
        draft.backward = draft.backward.replace("{loss}", "scaler.scale({loss})")
        if value == "unscales":
            draft.after_backward.insert(0, "scaler.unscale_(opt)")
        draft.update = [*(_OVERFLOW if value == "overflows" else ()), "scaler.step(opt)", "scaler.update()"]
