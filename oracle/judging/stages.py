"""Containers of which a pipeline stage has a part only: what goes into its part, and comes out, is not what goes into the whole.

In the reference a container (a `Sequential`, the model itself) hands on what its last child gives, and its first child gets what it got. A rank
that holds none of that child has another module's values at the container's edge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from proctor.oracle.merging.reference import Reference
from proctor.oracle.merging.replicas import same_bits

_SIDES: Final = {"input": "input", "grad_input": "input", "output": "output", "grad_output": "output"}


class Stages:
    """Edges of containers in a reference.

    Args:
        reference: that is trusted.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._children: dict[tuple[str, str], str] = {}
        self._owners = frozenset(k[3].rpartition(".")[0] for k in reference.entries if k[2] == "param" and k[0] == 0)
        self._edges: Mapping[str, list[tuple[int, str]]] = _by_order(reference)

    def foreign(self, module: str, kind: str, held: Collection[str]) -> bool:
        """Whether a rank's tensor at an edge of a container is that of another module.

        Args:
            module: path of the container.
            kind: of the tensor.
            held: modules of the reference of which the rank has parameters.
        """
        side = _SIDES.get(kind)
        child = self._child(module, side) if side is not None else ""
        return bool(child) and not any(_within(owner, child) for owner in held)

    def _child(self, module: str, side: str) -> str:
        """The outermost module inside it that has parameters and whose values at the edge are its own; "" for none."""
        if (module, side) not in self._children:
            self._children[module, side] = self._find(module, side)
        return self._children[module, side]

    def _find(self, module: str, side: str) -> str:
        inside = [name for _, name in self._edges[side] if name != module and _within(name, module)]
        own = self._reference.slots.get((0, 0, side, module), ())
        if not inside or len(own) != 1:
            return ""
        values = self._reference.array(self._reference.entries[0, 0, side, module, own[0]])
        for name in inside if side == "input" else inside[::-1]:
            theirs = self._reference.slots.get((0, 0, side, name), ())
            if len(theirs) == 1 and any(_within(owner, name) for owner in self._owners):
                other = self._reference.array(self._reference.entries[0, 0, side, name, theirs[0]])
                return name if other.shape == values.shape and other.dtype == values.dtype and same_bits(other, values) else ""
        return ""


def _by_order(reference: Reference) -> dict[str, list[tuple[int, str]]]:
    """Modules by the order in which the reference's first step saw their inputs, and their outputs."""
    found: dict[str, dict[str, int]] = {"input": {}, "output": {}}
    for (step, call, kind, name, _), entry in reference.entries.items():
        if step == 0 and call == 0 and kind in found:
            found[kind].setdefault(name, entry.order)
    return {side: sorted((order, name) for name, order in names.items()) for side, names in found.items()}


def _within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")
