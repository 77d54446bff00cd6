"""Does every operation of a large program have the surroundings of one in a small program that was proved by formulas?

An operation's surroundings are the operations that what it takes was made by, back over `REACH` of them: their names, arguments, modules, parameters,
groups as axes of the mesh, peers as places on it, through sends to those that received. Sizes are left out: of layers, ranks, microbatches and widths there
are more in the large program, so whole numbers, their inverses and numbers in names stand for any. What an operation adds to in place counts as what made it last and
no farther, so a sum over microbatches looks alike after each. So a layer, a microbatch, a stage or a rank that does anything else than those of the small
program is found. That numbers which were left out are right is not looked at here: the large program is judged as a whole at random points (`__init__.py`).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import defaultdict
from typing import Any, Final

import numpy as np

from proctor.oracle.prove import collectives
from proctor.oracle.prove.lanes.family import World, axes_of, offset_of, peer_of
from proctor.oracle.prove.locate import Flow
from proctor.oracle.prove.tape import Array, Node, Tape, Window, collective

REACH: Final = 4  # operations; in a transformer that is past the middle of a block, and two blocks back along its residual sum
_ADDS: Final = ("aten.add.Tensor", "aten.add_.Tensor")
_BEGINS: Final = {"aten.select_backward.default": (3,), "aten.slice_backward.default": (3, 4)}  # where a part lies; forward that is a view's offset
_NUMBER: Final = re.compile(r"\d+")


class Skeleton:
    """Surroundings of all operations of both sides.

    Args:
        reference: of one rank.
        world: all ranks of the candidate.
    """

    def __init__(self, reference: Tape, world: World) -> None:
        self._tapes: list[tuple[str, Tape]] = [("reference", reference), *(("candidate", family.tape) for family in world.families)]
        self._world = world
        self._starts = np.cumsum([0, *(len(tape.nodes) for _, tape in self._tapes)])
        self._known: dict[str, int] = {}
        self.colours = self._coloured()

    def strange(self, small: Array) -> str:
        """The first operation whose surroundings the small program, which has these `colours`, does not have; "" when it has them all."""
        other = np.flatnonzero(~np.isin(self.colours, small))
        if not other.size:
            return ""
        which = int(np.searchsorted(self._starts, other[0], side="right")) - 1
        side, tape = self._tapes[which]
        node = tape.nodes[int(other[0] - self._starts[which])]
        return f"{node.op} in {node.module or 'no module'} ({node.phase}) at {node.place or 'no line'}, of {'rank ' + str(tape.rank) if side == 'candidate' else 'the reference'}"

    def _coloured(self) -> Array:
        base = np.zeros(int(self._starts[-1]), np.uint64)
        edges: list[tuple[int, int, int, bool]] = []  # from, to, how it is taken, whether it is added to in place
        for which, (side, tape) in enumerate(self._tapes):
            start, flow = int(self._starts[which]), Flow(tape)
            held = {h.window.storage: _nameless(h.name) for h in tape.held}
            for at, node in enumerate(tape.nodes):
                base[start + at] = self._hash(f"{side} {self._said(node, tape, held)}")
                kept = {w.storage for w in node.outs if w is not None}
                for maker, number in zip(flow.makers[at], flow.taken[at]):
                    w = node.ins[number]
                    edges.append((start + maker, start + at, self._hash(f"{number} {_look(w)}"), w.storage in kept))
        edges += self._sent()
        if not edges:
            return _mixed(base)
        source, to, slot, added = (np.array(column) for column in zip(*edges))
        order = np.argsort(to, kind="stable")
        source, to, slot, added = source[order], to[order], slot[order], added[order]
        adds = np.concatenate([[node.op in _ADDS for node in tape.nodes] for _, tape in self._tapes])
        added |= adds[to] & (base[source] == base[to]) & (np.bincount(source, minlength=len(base))[source] == 1)  # nothing else takes what was added up so far
        begins = np.flatnonzero(np.r_[True, to[1:] != to[:-1]])
        slots = slot.astype(np.uint64)
        colours = _mixed(base)
        first = colours.copy()
        for _ in range(REACH):
            given = _mixed(np.where(added, first[source], colours[source]) ^ slots)
            sums = np.zeros_like(base)
            sums[to[begins]] = np.add.reduceat(given, begins)
            colours = _mixed(first + sums)
        return colours

    def _sent(self) -> list[tuple[int, int, int, bool]]:
        """From sends to what received, in their order."""
        mail: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        asked: list[tuple[tuple[int, int, int], int]] = []
        for which, (side, tape) in enumerate(self._tapes):
            if side == "reference":
                continue
            for at, node in enumerate(tape.nodes):
                name = node.op.split(".")[1] if node.op.startswith("c10d.") else ""
                if name in collectives.SEND or name in collectives.RECEIVE:
                    peer, tag, here = self._world.split(peer_of(node))[0] + 1, int(node.args[3] or 0), int(self._starts[which]) + at
                    if name in collectives.SEND:
                        mail[which, peer, tag].append(here)
                    else:
                        asked.append(((peer, which, tag), here))
        found, slot = [], self._hash("received")
        for key, here in asked:
            if mail[key]:
                found.append((mail[key].pop(0), here, slot, False))
        return found

    def _said(self, node: Node, tape: Tape, held: dict[int, str]) -> str:
        """An operation without sizes."""
        far: Any = ""
        if collective(node.op):
            mesh = self._world.mesh
            name = node.op.split(".")[1]
            far = offset_of(node, tape.rank, mesh) if name in collectives.SEND or name in collectives.RECEIVE else [mesh.axes[k] for k in axes_of(node.ranks, tape.rank, mesh) if mesh.sizes[k] > 1]
            arguments: Any = ""  # names of groups, and objects
        else:
            arguments = ["n" if k in _BEGINS.get(node.op, ()) else _plain(a) for k, a in enumerate(node.args)], {k: _plain(v) for k, v in node.kwargs.items()}
        looks = [(_look(w), held.get(w.storage, "")) for w in node.ins]
        return f"{node.op} {arguments} {far} {_nameless(node.detail)} {_nameless(node.module)} {node.phase} {looks} {[None if w is None else _look(w) for w in node.outs]}"

    def _hash(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return self._known[text]


@functools.lru_cache(1 << 14)
def _nameless(text: str) -> str:
    """A name without its numbers."""
    return _NUMBER.sub("#", text)


def _look(w: Window) -> str:
    """How a tensor lies in its storage, without sizes, but for those that are 1: these are not as good as any."""
    return _seen(w.kind, w.size, w.stride)


@functools.lru_cache(1 << 14)
def _seen(kind: str, size: tuple[int, ...], stride: tuple[int, ...]) -> str:
    order = sorted((k for k, n in enumerate(size) if n > 1), key=lambda k: (-stride[k], k))
    return f"{kind}{len(size)}{order}{[k for k, s in enumerate(stride) if s == 0 and size[k] > 1]}"


def _plain(value: Any) -> Any:
    """An argument without sizes: whole numbers beyond those of a dimension, and inverses of whole numbers, stand for any."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return "read" if "r" in value else str(value)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if value in (-1, 0, 1) else "n"
    if value in (-1.0, 0.0, 1.0) or not np.isfinite(value):
        return str(value)
    whole = abs(value) if abs(value) > 1 else 1 / abs(value)
    return "n" if abs(whole - round(whole)) < 1e-6 * whole else value


def _mixed(x: Array) -> Array:
    """Bits that depend on all bits (splitmix64)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


__all__ = ["REACH", "Skeleton"]
