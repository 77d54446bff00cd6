"""Calls of FSDP2 that take more than a switch: prefetching, dividing, gathering by hand, another forward method, a failed pass that is given up."""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.fsdp2 import WRAPPERS
from proctor.oracle.fuzz.space import Choice, Point, Value

_EACH: Final = "for m in net.modules():"
_OF_EACH: Final = "    if isinstance(m, FSDPModule): m."
# Value → lines once the model is wrapped; here and below `{units}` is a list of its units, `{forward}` the forward pass.
_WRAPPED: Final[dict[str, tuple[str, ...]]] = {
    "forward prefetch": ("units = {units}", "for a, b in zip(units, units[1:]): a.set_modules_to_forward_prefetch([b])"),
    "backward prefetch": ("units = {units}", "for a, b in zip(units, units[1:]): b.set_modules_to_backward_prefetch([a])"),
    "prefetch all": ("net.set_modules_to_forward_prefetch({units})", "net.set_modules_to_backward_prefetch({units}[::-1])"),
    "divide by 1": (_EACH, f"{_OF_EACH}set_gradient_divide_factor(1.0)"),
    "divide by 3": (_EACH, f"{_OF_EACH}set_gradient_divide_factor(3.0)"),
    "all-reduce hook": (_EACH, f"{_OF_EACH}set_all_reduce_hook(lambda t: t.mul_(0.5))"),
    "three buffers": ("net.set_reduce_scatter_max_input_buffers(3)",),
    "method": ("register_fsdp_forward_method(net, 'run')",),
}
_SCALES: Final = {"divide by 1": "", "divide by 3": " * 3", "all-reduce hook": " * (2 * world)"}
# Value → lines before a microbatch's forward pass.
_BEFORE: Final[dict[str, tuple[str, ...]]] = {
    "gather": (_EACH, f"{_OF_EACH}unshard()"),
    "gather later": (_EACH, f"{_OF_EACH}unshard(async_op=True)"),
    "failed forward": (
        "failing = {units}[-1].register_forward_hook(lambda *_: 1 / 0)",
        "try: {forward}",
        "except ZeroDivisionError: net.reset_iter_state()",
        "failing.remove()",
    ),
    "failed backward": (
        "failed = {forward}",
        "failed.register_hook(lambda g: 1 / 0)",
        "try: failed.sum().backward()",
        "except ZeroDivisionError: net.reset_iter_state()",
    ),
}
_FAILED: Final = tuple(name for name in _BEFORE if name.startswith("failed"))
_RESHARD: Final = "reshard"


@register
class Call(OfWrapper):
    """One of these calls."""

    of = WRAPPERS
    absent = "there is no FSDP"
    order = 64
    choice = Choice("fsdp_call", ("", *_WRAPPED, *_BEFORE, _RESHARD), rare=0.4)
    rules = (
        Rule("invalid", "there are no units to gather before they are needed", when={"fsdp_call": ("forward prefetch", "backward prefetch", "prefetch all")}, unless={"fsdp_units": ("each",)}),
        Rule("invalid", "a pass that failed draws, or counts, once more", when={"fsdp_call": _FAILED}, traits=frozenset({"powers"})),
        Rule("different", "the running statistics see the rows of the pass that failed", when={"fsdp_call": _FAILED},
             traits=frozenset({"local statistics"})),
        Rule("different", "it documents that gradients which add up unreduced are lost with a pass that is given up", when={"fsdp_call": _FAILED}, unless={"sync": ("every", "reshard last", "waited for last")}),
        Rule("invalid", "another method is no forward pass of a module that is compiled or recomputed", when={"fsdp_call": ("method",)}, unless={"compile": ("no",)}),
        Rule("invalid", "a subgroup that parameters stay cut over has no hook of its own", when={"fsdp_call": ("all-reduce hook",)}, unless={"wrapper": ("fsdp2", "hsdp")}),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        call = str(value)
        draft.add_import("from torch.distributed.fsdp import FSDPModule")
        units = draft.code.units if setting["fsdp_units"] == "each" else ()
        draft.wrap += [line.format(units=f"[{', '.join(units)}]") for line in _WRAPPED.get(call, ())]
        draft.scale = _SCALES.get(call, draft.scale)
        if call == "method":
            draft.add_import("from torch.distributed.fsdp import register_fsdp_forward_method")
            draft.prelude.append("Net.run = Net.forward")
            draft.forward = draft.forward.replace("net(", "net.run(")
        every = f"[{', '.join(draft.code.units or ('net',))}]"
        draft.before_part += [line.format(forward=draft.forward, units=every) for line in _BEFORE.get(call, ())]
        if call == _RESHARD:
            draft.after_update += [_EACH, f"{_OF_EACH}reshard()"]
