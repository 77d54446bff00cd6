"""Which numbers of a tape are made up: a fake process group did not carry what other ranks sent before the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from proctor.oracle.prove import collectives
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.tape import Array, Event, Tape, Window


def made_up(tapes: Sequence[Tape]) -> list[set[int]]:
    """Of each rank, the collectives before the step that would have left it with other numbers than a fake process group did.

    A collective that is not known, that ranks of its group did not call, or that is too large to be kept, counts. Of ranks that were not
    recorded it is taken that they broadcast what those that were hold.
    """
    by_rank = {tape.rank: tape for tape in tapes}
    return [{k for k, event in enumerate(tape.before) if not _is_true(by_rank, tape.rank, event)} for tape in tapes]


def _is_true(tapes: Mapping[int, Tape], rank: int, event: Event) -> bool:
    name = event.node.op.split(".")[1]
    if name in ("barrier", "monitored_barrier_"):
        return True
    there = [_same(tapes[m], event) if m in tapes else event if name.startswith("broadcast") else None for m in event.node.ranks]
    means = collectives.find(event.node.op)
    known = [e for e in there if e is not None]
    if means is None or rank not in event.node.ranks or len(known) < len(there) or len({e.node.op for e in known}) > 1:
        return False

    def read(member: int, window: Window) -> Array:
        given = known[member].given[window.storage]
        return (given.astype(np.float64) if window.kind == "f" else given.astype(np.int64)).reshape(window.size)

    try:
        written = list(means(collectives.Joint(F64(), [e.node for e in known], read)))[event.node.ranks.index(rank)]
        left = dict(event.left)
        return all(_near(np.asarray(value).reshape(-1), left[window.storage]) for window, value in written)
    except (ValueError, IndexError, KeyError, TypeError, NotImplementedError):
        return False


def _same(tape: Tape, event: Event) -> Event | None:
    return next((e for e in tape.before if e.turn == event.turn and e.node.ranks == event.node.ranks), None)


def _near(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-6, atol=0.0, equal_nan=True))


def relied_on(candidate: Sequence[Tape]) -> str:
    """What a step takes from a collective before it that a fake process group did not do, in words; "" for nothing."""
    for tape, events in zip(candidate, made_up(candidate)):
        for k, place in tape.relied:
            if k in events:
                node = tape.before[k].node
                used = f", used at {place}," if place else ""
                return f"the step of rank {tape.rank} takes what {node.op} of ranks {list(node.ranks)} at {node.place or 'no line'} gives before it{used} and a fake process group does not carry what other ranks send: judge it as a command with real ranks"
    return ""
