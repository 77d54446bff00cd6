"""Resume: after the first step the state is saved and loaded into a program that begins anew."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OPTIONS = {
    "sharded": "StateDictOptions()",
    "full": "StateDictOptions(full_state_dict=True)",
    "flat": "StateDictOptions(flatten_optimizer_state_dict=True)",
    "broadcast": "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
}


@register
class Resume(Axis):
    """`get_state_dict` and `set_state_dict` of torch's distributed checkpoint in several forms, or the optimizer's own methods; or the state is asked for before training, and nothing is loaded."""

    choice = Choice("resume", ("no", "plain", *_OPTIONS, "asked"), rare=0.5)
    order = 70
    rules = (
        Rule("invalid", "the schedule would follow the optimizer from before", when={"scheduler": ("ExponentialLR", "OneCycleLR")}, unless={"resume": ("no",)}),
        Rule("invalid", "a flat state holds tensors and numbers, LBFGS has lists", when={"resume": ("flat",), "optimizer": ("LBFGS",)}),
        Rule("invalid", "ZeRO has a state_dict of its own to be consolidated first", when={"wrapper": ("zero",)}, unless={"resume": ("no",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        if value == "plain":
            draft.after_step += [
                "if step == 0:",
                "    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))",
                "    net, opt = build(rank, world)",
                "    net.load_state_dict(saved[0]), opt.load_state_dict(saved[1])",
            ]
            draft.add_import("import copy")
            return
        draft.add_import("from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict")
        if value == "asked":
            draft.after_build.append("get_state_dict(net, opt)")
            return
        draft.add_import("import copy")
        draft.after_step += [
            "if step == 0:",
            f"    options = {_OPTIONS[str(value)]}",
            f"    saved = copy.deepcopy(get_state_dict(net, opt, options={'StateDictOptions(full_state_dict=True)' if value == 'broadcast' else 'options'}))",
            "    net, opt = build(rank, world)",
            "    set_state_dict(net, opt, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)",
        ]
