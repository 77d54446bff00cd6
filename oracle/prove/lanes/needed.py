"""Which operations do integers come from that are made of floats, such as a routing? Doubles need no others, where the fields refute nothing.

A rank's tape is gone through backwards, by storages: what writes to one that something needs is needed, whatever it writes. A collective that one family needs
is needed of all that take part, and what is received, of who sent it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from proctor.oracle.prove import collectives
from proctor.oracle.prove.lanes.machine import LaneMachine, from_floats
from proctor.oracle.prove.tape import MARK, READ, Node, Tape, collective, numbers

Key = tuple[object, ...]  # of a collective or a message, the same on all that take part


def needed(machine: LaneMachine) -> list[set[int]]:
    """Of each family, numbers of operations.

    Args:
        machine: of all ranks, before it runs.
    """
    tapes = [family.tape for family in machine.world.families]
    talks = [_talks(machine, r, tape) for r, tape in enumerate(tapes)]
    wanted: set[Key] = set()
    while True:
        before = len(wanted)
        found = [_backwards(tape, talk, wanted) for tape, talk in reversed(list(zip(tapes, talks)))]  # a later stage needs the one before it
        if len(wanted) == before:
            return found[::-1]


def _talks(machine: LaneMachine, r: int, tape: Tape) -> dict[int, Key]:
    """Collectives and messages by their operation."""
    turns: dict[Key, int] = defaultdict(int)
    found: dict[int, Key] = {}
    for at, node in enumerate(tape.nodes):
        if not collective(node.op):
            continue
        key: Key
        if _sends(node) or _receives(node):
            peer = machine.peer(node)
            key = ("sent", *((r, peer) if _sends(node) else (peer, r)), int(node.args[3] or 0))
        else:
            key = machine.group(r, node)
        found[at] = (key, turns[key])
        turns[key] += 1
    return found


def _sends(node: Node) -> bool:
    return node.op.startswith("c10d.") and node.op.split(".")[1] in collectives.SEND


def _receives(node: Node) -> bool:
    return node.op.startswith("c10d.") and node.op.split(".")[1] in collectives.RECEIVE


def _backwards(tape: Tape, talks: dict[int, Key], wanted: set[Key]) -> set[int]:
    """A family's operations; what it needs of others is added to `wanted`."""
    storages: set[int] = set()
    read: set[int] = set()
    found: set[int] = set()
    nodes: Sequence[Node] = tape.nodes
    for at in range(len(nodes) - 1, -1, -1):
        node = nodes[at]
        if node.op == MARK:
            continue
        made = node.ins if at in talks and _receives(node) else node.outs
        if not (at in read if node.op == READ else from_floats(node) or (at in talks and talks[at] in wanted) or any(w is not None and w.storage in storages for w in made)):
            continue
        found.add(at)
        if at in talks:
            wanted.add(talks[at])
        storages.update(w.storage for w in node.ins)
        read.update(numbers([node.args, node.kwargs]))
    return found


__all__ = ["needed"]
