"""transformers: how its models compute the same: the implementation of attention, and gradient checkpointing as the library switches it on."""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final = frozenset({"transformers"})


@register
class Attention(Axis):
    """The implementation of attention; the reference has the library's own choice."""

    library = "transformers"
    order = 30
    choice = Choice("hf_attention", ("", "eager", "sdpa"))
    rules = (
        Rule("invalid", "the model is none of the library's", unless={"hf_attention": ("",)}, lacks=_OURS),
        Rule("approximate", "norms and rotary positions are computed in single precision, whatever the parameters have", traits=_OURS, tolerance=3e-5),
        Rule("approximate", "the softmax of its eager attention is in single precision", when={"hf_attention": ("eager",)}, tolerance=3e-5),
        Rule("invalid", "grouped experts have no kernel for double precision", unless={"precision": ("float32",)}, traits=frozenset({"grouped experts"})),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.prelude.append(f"net.lm.set_attn_implementation('{value}')")


@register
class Checkpointing(Axis):
    """`gradient_checkpointing_enable`."""

    library = "transformers"
    order = 31
    choice = Choice("hf_checkpointing", ("", "use_reentrant=False", "use_reentrant=True"))
    rules = (
        Rule("invalid", "the model is none of the library's", unless={"hf_checkpointing": ("",)}, lacks=_OURS),
        Rule("invalid", "it is recomputed already", unless={"hf_checkpointing": ("",), "recompute": ("no",)}),
        Rule("invalid", "DDP takes reentrant checkpoints only of a static graph", when={"hf_checkpointing": ("use_reentrant=True",), "wrapper": ("ddp", "zero", "accelerate")},
             unless={"ddp": ("static_graph=True",), "ddp_also": ("static_graph=True",), "acc_ddp": ("static_graph=True",), "acc_plugin": ("fsdp2",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.prelude.append(f"net.lm.gradient_checkpointing_enable(dict({value}))")
