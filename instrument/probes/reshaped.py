"""Whether dimensions change places by a reshape, which mixes their elements.

A row of `Value.KEPT`, `reshaped`, of a loss whose graph has a reshape from one shape to another that has the same sizes in another order, of three dimensions at least and with two sizes that are not 1 and differ: elements stay in their order,
so that a sample, channel or place gets parts of others. So do dimensions that were joined in one order (samples and places, to one) and are taken apart in the other, where each operation in between keeps the joined one.
A permutation followed by a reshape is none, as what it permutes has the order of the result. Told when it is seen a second time. Cost: 1 µs a node, at most 20,000 of them, of eight backwards.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import Sink, register
from proctor.instrument.probes.graphs import OfLosses, kind_of, nodes
from proctor.invariants.schema import Value

_KINDS: Final = frozenset({"ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward"})
_LEAST: Final = 3  # dimensions
_TWICE: Final = 2
_FAR: Final = 64  # operations between where dimensions are joined and where they are taken apart


@register
class Reshaped(OfLosses):
    """Reshapes in the place of permutations."""

    name = "reshaped"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._times = 0

    def look(self, roots: list[Any], nth: int) -> None:
        found = mixed(roots)
        if not found:
            return
        self._times += 1
        if self._times == _TWICE:
            self.sink.number("loss", float(len(found)), kind=Value.KEPT, facts={"what": "reshaped", "seen": found[0]})


def mixed(roots: list[Any]) -> list[str]:
    """Reshapes that swap dimensions, in words."""
    found = []
    for node in nodes(roots) or ():
        shapes = _shapes(node)
        if shapes is None:
            continue
        before, after = shapes
        if _swapped(before, after):
            found.append(f"a reshape makes {list(after)} of {list(before)}: the sizes change places and the elements do not, so that they are mixed")
        elif len(after) == len(before) + 1 and before and after[2:] == before[1:] and _apart(after[:2]):
            joined = _joined(node, before[0])
            if joined is not None and joined == after[1::-1]:
                found.append(f"{joined[0]} by {joined[1]} rows were joined to {before[0]}, and are taken apart as {after[0]} by {after[1]}: the elements of one are mixed with those of others")
    return found


def _shapes(node: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What a reshape was given and gave; None of other operations."""
    if kind_of(node) not in _KINDS:
        return None
    before = getattr(node, "_saved_self_sym_sizes", None) or getattr(node, "_saved_self_sizes", None)
    known = getattr(node, "_input_metadata", ())
    if before is None or not known:
        return None
    return tuple(int(n) for n in before), tuple(int(n) for n in known[0].shape)


def _swapped(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether these are the same sizes in another order; sizes of 1 have no place."""
    wide, now = ([n for n in shape if n != 1] for shape in (before, after))
    return len(before) >= _LEAST and len(before) == len(after) and wide != now and sorted(wide) == sorted(now)


def _apart(pair: tuple[int, ...]) -> bool:
    return pair[0] != pair[1] and min(pair) > 1


def _joined(node: Any, rows: int) -> tuple[int, ...] | None:
    """The two dimensions that the first one of a reshape's argument was made of, if one way leads there on which each result has so many rows."""
    at = node
    for _ in range(_FAR):
        ways = [following for following, _ in at.next_functions if following is not None and _rows(following) == rows]
        if len(ways) != 1:
            return None
        at = ways[0]
        shapes = _shapes(at)
        if shapes is not None:
            before, after = shapes
            if len(before) == len(after) + 1 and after[0] == rows and before[2:] == after[1:]:
                return before[:2] if _apart(before[:2]) else None
            if after[0] != rows or before[0] != rows:
                return None
        elif kind_of(at) in ("PermuteBackward", "TransposeBackward", "IndexBackward", "IndexSelectBackward", "GatherBackward"):
            return None
    return None


def _rows(node: Any) -> int:
    known = getattr(node, "_input_metadata", ())
    return int(known[0].shape[0]) if known and len(known[0].shape) else 0
