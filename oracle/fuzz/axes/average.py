"""An average of the weights that is kept beside the training, and with which the model is evaluated: torch's own, or one that a program keeps by itself."""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import Axis, Rule, not_of_calls, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.form import WRAPPERS
from proctor.oracle.fuzz.axes.fsdp2 import WRAPPERS as SHARDED
from proctor.oracle.fuzz.axes.tensor_parallel import WRAPPERS as CUT
from proctor.oracle.fuzz.space import Choice, Point, Value

_OFF: Final[dict[str, tuple[Value, ...]]] = {"average": ("no",)}
_EMA: Final = "torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)"
_COPIED: Final = "kept = [p.detach().clone() for p in net.parameters()]"
_PUT_BACK: Final = "for k, p in zip(kept, net.parameters()): p.data.copy_(k)"
# Kind → how it is made, moved after an update, and put in place of the weights.
_OWN: Final[dict[str, tuple[str, str, str]]] = {
    "list": (_COPIED, "for k, p in zip(kept, net.parameters()): k.lerp_(p.detach(), 0.5)", _PUT_BACK),
    "foreach": (
        _COPIED,
        "torch._foreach_mul_(kept, 0.5); torch._foreach_add_(kept, [p.detach() for p in net.parameters()], alpha=0.5)",
        _PUT_BACK,
    ),
    "state": (
        "kept = {k: t.detach().clone() for k, t in net.state_dict().items()}",
        "for k, t in net.state_dict().items(): kept[k].copy_(kept[k] * 0.5 + t * 0.5 if t.is_floating_point() else t)",
        "net.load_state_dict(kept)",
    ),
}
_TORCHS: Final = {"AveragedModel": f"multi_avg_fn={_EMA}", "AveragedModel, buffers": f"multi_avg_fn={_EMA}, use_buffers=True", "AveragedModel, mean": ""}
_TOGETHER: Final = ("AveragedModel", "AveragedModel, buffers", "foreach")  # one call over all parameters


@register
class Average(Axis):
    """Half of what it was and half of the weights, after each update; torch's, their mean, too."""

    program = True
    order = 95
    sorts = True
    choice = Choice("average", ("no", *_TORCHS, *_OWN), rare=0.1)
    rules = (
        Rule("invalid", "the wrapper has a training loop of its own", unless={**_OFF, "wrapper": WRAPPERS}),
        Rule("invalid", "the average is no part of a checkpoint of model and optimizer", unless={**_OFF, "before": ("same",)}),
        Rule("invalid", "the average is no part of a checkpoint of model and optimizer", unless={**_OFF, "before_world": (0,)}),
        Rule("invalid", "FSDP2 says that it cannot be copied", when={"average": tuple(_TORCHS), "wrapper": SHARDED}),
        Rule("invalid", "one call over parameters of which only some are cut, which the library refuses", when={"average": _TOGETHER, "wrapper": CUT}, lacks=frozenset({"wholly cut"})),
        Rule("invalid", "one call over parameters on meshes of one and of two dimensions, which the library refuses", when={"average": _TOGETHER, "wrapper": ("tp_fsdp2",)}),
        Rule("invalid", "what is compiled is one forward pass of one model", unless={**_OFF, "compile": ("no",)}),
        *not_of_calls(_OFF),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        kind = str(value)
        if kind in _TORCHS:
            more = f", {_TORCHS[kind]}" if _TORCHS[kind] else ""
            draft.before_loop.append(f"kept = torch.optim.swa_utils.AveragedModel(net{more})")
            draft.after_update.append("kept.update_parameters(net)")
            draft.before_evaluation.append("kept.eval()")
            draft.evaluation = (draft.evaluation or draft.forward).replace("net(", "kept(")
        else:
            made, moved, used = _OWN[kind]
            draft.before_loop.append(made)
            draft.after_update.append(moved)
            draft.before_evaluation.append(used)
