"""Ranks that were recorded on a fake process group, with the integers that they would have had on a true one.

A fake group carries no floats, so a routing that is made of what other ranks send is made up. All ranks are run in doubles, and what torch's own
kernels make of true floats takes the place of what was recorded. Where other recorded numbers were made of such integers, they would be stale:
nothing is replaced then, and the proof says that it cannot be had (`made_up.py`, `prover.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from proctor.oracle.prove.lanes.machine import Integers
from proctor.oracle.prove.tape import Array, Tape


def routed(tapes: Sequence[Tape], integers: Integers) -> list[Tape]:
    """Tapes with other integers.

    Args:
        tapes: of all ranks, in order.
        integers: of (rank, operation), what each of its results is in truth; None where it is as recorded.
    """
    found = []
    for rank, tape in enumerate(tapes):
        mine = {at: parts for (r, at), parts in integers.items() if r == rank and parts is not None}
        if _stale(tape, mine):
            return list(tapes)
        blocks, nodes = list(tape.blocks), list(tape.nodes)
        for at, parts in mine.items():
            values = list(nodes[at].values)
            for k, part in enumerate(parts):
                if part is None or values[k] < 0:
                    continue
                was = blocks[values[k]]
                if part.size != was.size:  # how many there are depends on data, and so does what follows
                    return list(tapes)
                blocks.append(part.reshape(-1).astype(was.dtype))
                values[k] = len(blocks) - 1
            nodes[at] = structs.replace(nodes[at], values=values)
        found.append(structs.replace(tape, nodes=nodes, blocks=blocks))
    return found


def _stale(tape: Tape, integers: Mapping[int, Sequence[Array | None]]) -> bool:
    """Whether recorded numbers were made of integers that are others now."""
    changed: set[int] = set()
    for at, node in enumerate(tape.nodes):
        parts = integers.get(at)
        if parts is None:
            if max(node.values, default=-1) >= 0 and any(w.storage in changed for w in node.ins):
                return True
            continue
        for part, value, w in zip(parts, node.values, node.outs):
            if part is not None and w is not None and value >= 0 and part.reshape(-1).tolist() != tape.blocks[value].tolist():
                changed.add(w.storage)
    return False


__all__ = ["routed"]
