"""`torch.compile` with the backend `aot_eager` (dynamo's capture and autograd's traced graphs, without generated code): the model, its units, the wrapped model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_RESET = "torch._dynamo.reset()"


@register
class Compile(Axis):
    """What is compiled: the model before it is wrapped, each of its units, or what the wrapper made of it."""

    choice = Choice("compile", ("no", "model", "units", "wrapped"), rare=0.02)
    costs: ClassVar[Mapping[str, float]] = {"model": 20.0, "units": 20.0, "wrapped": 20.0}
    order = 32  # after recomputation, before the wrapper
    rules = (
        Rule("invalid", "parameters are cut by the names of their layers, which compiled units change", when={"compile": ("units",), "wrapper": ("tp", "tp_fsdp2")}),
        Rule("invalid", "units are named as a whole list", when={"compile": ("units",)}, traits=frozenset({"transformers"})),
        *(Rule("invalid", why, unless={"compile": ("no",)}, traits=frozenset({trait})) for trait, why in (
            ("operator", "the expression is what is looked at"), ("collective", "the collective is what is looked at"), ("exchange", "the collective is what is looked at"), ("torchrec", "a plan's tables are not compiled"),
        )),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("import torch._dynamo")
        draft.prelude.insert(0, _RESET)  # what was compiled of the same text before
        if value == "model":
            draft.prelude.append("net.compile(backend='aot_eager')")
        elif value == "units":
            draft.prelude += [f"{unit} = torch.compile({unit}, backend='aot_eager')" for unit in draft.code.units]
        else:
            draft.forward = draft.forward.replace("net(", "net.run(", 1)
            line = "object.__setattr__(net, 'run', torch.compile(net, backend='aot_eager'))  # no submodule"
            draft.finish.append(lambda: draft.after_build.append(line))  # behind what wraps the model together with its optimizer
