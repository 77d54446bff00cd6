"""Clipping of gradients between backward pass and update."""

from __future__ import annotations

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value


@register
class Clip(Axis):
    """By norm of several kinds, or by value; always so tight that it acts."""

    program = True
    choice = Choice("clip", ("no", "2", "inf", "1", "0.5", "0", "value"))

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        if value == "value":
            draft.after_backward.append("nn.utils.clip_grad_value_(net.parameters(), 0.05)")
        else:
            draft.after_backward.append(draft.clip_norm.format(limits=f"0.5, norm_type=float('{value}')"))


@register
class ClipForeach(Axis):
    """How the norm is computed."""

    order = 60
    choice = Choice("clip_foreach", ("", "True", "False"))
    rules = (Rule("invalid", "FSDP1's own clipping has no such argument", when={"wrapper": ("fsdp1",)}, unless={"clip_foreach": ("",)}),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "nothing is clipped" if setting["clip"] == "no" else ""

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.after_backward[-1] = draft.after_backward[-1][:-1] + f", foreach={value})"
