"""Whether a loss takes a value from itself.

A row of `Value.KEPT`, `itself`, of a backward whose graph has a difference, or a distance, of one result of one operation and the same one again: it is 0, and so is its gradient,
whatever is trained. One that is made of a value and its copy without gradients (a straight-through estimator) is none, nor are differences of all pairs of a list, of which some are
of one with itself: there the value is also taken from another. Cost: 1 µs a node, at most 20,000 of them, of eight backwards.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import register
from proctor.instrument.probes.graphs import OfLosses, kind_of, nodes
from proctor.invariants.schema import Value

_MOVED: Final = frozenset("View UnsafeView ReshapeAlias Clone Expand Transpose T Permute Select Slice Squeeze Unsqueeze ToCopy Alias Unbind Split AsStrided".split())
_KINDS: Final = {
    "SubBackward": "a difference", "MseLossBackward": "a squared error", "L1LossBackward": "an absolute error", "SmoothL1LossBackward": "a smooth absolute error", "HuberLossBackward": "a Huber loss",
}  # fmt: skip


@register
class Differences(OfLosses):
    """Differences that are 0 by what they are made of."""

    name = "differences"
    kinds = frozenset({Value.KEPT})

    def look(self, roots: list[Any], nth: int) -> None:
        found = idle(roots)
        if found:
            seen = f"the loss goes through {_KINDS[found[0][0]]} of a value and itself (of what {found[0][1]} gave), which is always 0 and has no gradient"
            self.sink.number("loss", float(len(found)), kind=Value.KEPT, facts={"what": "itself", "seen": seen})


def idle(roots: list[Any]) -> list[tuple[str, str]]:
    """Differences of a value and itself behind these nodes: their kind, and the operation that gave the value."""
    alone, apart = [], set()
    for node in nodes(roots) or ():
        kind, inputs = kind_of(node), node.next_functions
        if kind in _KINDS and len(inputs) == 2 and inputs[0][0] is not None:
            if inputs[0] == inputs[1]:
                alone += [(kind, inputs[0])] if getattr(node, "_saved_alpha", 1) == 1 else []
            else:
                apart.update(inputs)
    return [(kind, _made(value[0])) for kind, value in alone if value not in apart]


def _made(node: Any) -> str:
    """The operation that gave a value, behind what only moves its elements."""
    while (name := kind_of(node).removesuffix("Backward")) in _MOVED and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return name
