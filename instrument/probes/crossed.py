"""Whether a loss holds each sample against each other one, since a column of numbers meets a row.

A row of `Value.KEPT`, `crossed`, of a backward whose graph has a difference, an error or a product of n results of a model that lie in a column (n, 1) and n numbers without gradients that lie in a row (n), or the other
way round: torch makes n by n numbers of them, and the mean goes over all pairs. It is told when it is seen a second time. Distances of all pairs on purpose are none: there results also meet results,
somewhere in the same graph. Numbers that come as (1, n) are none in a product; autograd does not tell them from a row in a difference. Cost: 1 µs a node, at most 20,000 of them, of eight backwards.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import Sink, register
from proctor.instrument.probes.graphs import OfLosses, kind_of, nodes
from proctor.invariants.schema import Value

_LEAST: Final = 4  # numbers: two or three may be pairs of something else
_ERRORS: Final = {"MseLossBackward": "a squared error", "L1LossBackward": "an absolute error", "SmoothL1LossBackward": "a smooth absolute error", "HuberLossBackward": "a Huber loss"}
_TWICE: Final = 2


@register
class Crossed(OfLosses):
    """Losses over all pairs of a batch that are meant to be over its samples."""

    name = "crossed"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._times = 0

    def look(self, roots: list[Any], nth: int) -> None:
        found = crossed(roots)
        if found is None:
            return
        self._times += 1
        if self._times >= _TWICE:
            what, column, n = found
            sides = f"a column of {n} results and a row of {n} numbers" if column else f"a row of {n} results and a column of {n} numbers"
            seen = f"the loss goes through {what} of {sides}, which torch makes {n} by {n} of: each sample is held against all others"
            self.sink.number("loss", float(n), kind=Value.KEPT, facts={"what": "crossed", "seen": seen})


def crossed(roots: list[Any]) -> tuple[str, bool, int] | None:
    """What a loss over all pairs goes through, whether the results are the column, and how many they are."""
    found, pairs = [], set()
    for node in nodes(roots) or ():
        kind, inputs = kind_of(node), node.next_functions
        if kind == "SubBackward" and len(inputs) == 2:
            n = _square(_shape(node, 0))
            sides = [i for i, (before, _) in enumerate(inputs) if before is not None]
            if n and len(sides) == 2:
                pairs.add(n)
            elif n and sides and (column := _line(_edge(inputs[sides[0]]), n)) is not None:
                found.append(("a difference", column, n))
        elif kind in _ERRORS and len(inputs) == 2 and inputs[1][0] is None and inputs[0][0] is not None and kind_of(inputs[0][0]) == "ExpandBackward":
            n = _square(tuple(_saved(node, "target")))
            if n and (column := _line(_edge(inputs[0][0].next_functions[0]), n)) is not None:
                found.append((_ERRORS[kind], column, n))
        elif kind == "MulBackward" and len(inputs) == 2:
            for mine, other in ((0, "other"), (1, "self")):
                n = _square(_shape(node, 0)) if inputs[1 - mine][0] is None and inputs[mine][0] is not None else 0
                column = _line(_edge(inputs[mine]), n) if n else None
                if column is not None and _saved(node, other) == ((n,) if column else (n, 1)):
                    found.append(("a product", column, n))
    return next((one for one in found if one[2] not in pairs), None)


def _square(shape: tuple[int, ...]) -> int:
    """The side of a square of numbers; 0 of any other shape."""
    return shape[0] if len(shape) == 2 and shape[0] == shape[1] >= _LEAST else 0


def _line(shape: tuple[int, ...], n: int) -> bool | None:
    """Whether so many numbers lie in a column, and not in a row; None where they do neither."""
    return {(n, 1): True, (n,): False}.get(shape)


def _edge(edge: tuple[Any, int]) -> tuple[int, ...]:
    return _shape(*edge)


def _shape(node: Any, nth: int) -> tuple[int, ...]:
    """The shape of what an operation gave; () where autograd does not say."""
    known = getattr(node, "_input_metadata", ())
    return tuple(known[nth].shape) if nth < len(known) else ()


def _saved(node: Any, name: str) -> tuple[int, ...]:
    """The shape of what an operation kept for its backward pass."""
    kept = getattr(node, f"_saved_{name}", None)
    return tuple(getattr(kept, "shape", ()))
