"""`Join` (`torch.distributed.algorithms.join`): a rank has one batch less than the others, which go on without it.

The last step's rows are dealt out to the others, so the reference is the same program: all rows, each step. Within the loop the rank that has left
shows nothing any more; behind it its model must be the others'.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import Axis, Rule, not_of_calls, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_ACTIVE: Final = "net.join(divide_by_initial_world_size=False)"
_BOTH: Final = "Join([net, opt])"
_OFF: Final[dict[str, tuple[Value, ...]]] = {"join": ("no",)}


@register
class JoinAxis(Axis):
    """No, or the context that the training loop stands in; the first rank leaves it before the last step."""

    choice = Choice("join", ("no", "net.join()", _ACTIVE, _BOTH), rare=0.15)
    order: ClassVar[int] = 63
    rules = (
        Rule("invalid", "the wrapper has no such context", unless={**_OFF, "wrapper": ("ddp", "zero")}),
        Rule("invalid", "ZeRO's optimizer joins, too", when={"wrapper": ("zero",)}, unless={"join": ("no", _BOTH)}),
        Rule("invalid", "the optimizer joins nothing", when={"join": (_BOTH,), "wrapper": ("ddp",)}),
        Rule("invalid", "one rank has nobody to wait for", when={"world": (1,)}, unless=_OFF),
        Rule("invalid", "the rows of the last step are dealt out otherwise", unless={**_OFF, "split": ("even",)}),
        *(
            Rule("invalid", "within the context nothing else may wait for the rank that has left", unless={**_OFF, axis: (neutral,)})
            for axis, neutral in (("resume", "no"), ("disk", "no"), ("zero_saved", "no"), ("averager", "no"))
        ),
        Rule("invalid", "LBFGS asks all ranks for the loss", when={"optimizer": ("LBFGS",)}, unless=_OFF),
        Rule("invalid", "the average of the rank that has left stays behind", unless={**_OFF, "average": ("no",)}),
        *not_of_calls(_OFF),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        last = draft.steps - 1
        if value == _BOTH:
            draft.add_import("from torch.distributed.algorithms.join import Join")
        if value == _ACTIVE:
            draft.scale = f" * (world - (step == {last}))"
        draft.within.append(str(value))
        draft.rows = f"({draft.rows} if step < {last} else torch.arange(0) if rank == 0 else torch.arange(n).tensor_split(world - 1)[rank - 1])"
        draft.ends = f"rank == 0 and step == {last}"
        draft.before_evaluation.append("step = -1  # rows as before")
