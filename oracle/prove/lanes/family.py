"""Ranks that run one program on their own parts: a few of them are run, and what the others do follows from their places on the mesh.

Two ranks along an axis of the mesh are alike if their steps are the same operations on the same storages, with groups that are the
same axes, peers at the same place, and offsets and shards that lie a constant step apart. Then the axis is one of *lanes*: the second
rank along each, and the farthest corner of all, are run and compared, and the others are taken to lie on the same line. Otherwise (stages of a
pipeline) each place along the axis is a program of its own, and is run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.prove.lanes.spread import Spread, here, uncollected
from proctor.oracle.prove.recording.operators import RANDOM
from proctor.oracle.prove.tape import Array, Node, Tape, Window, collective

MOST_RANKS: Final = 256  # that are run
Steps = tuple[int, ...]  # along each lane axis
Record = Callable[[Sequence[int]], list[Tape]]


class Unlike(Exception):
    """Ranks are not alike: why."""


class Shifted(Window, frozen=True, gc=False):
    """A window that lies elsewhere on each lane. `steps`: along each lane axis; `reach`: how much farther the farthest lane reaches."""

    steps: Steps = ()
    reach: int = 0

    @property
    def end(self) -> int:
        """One more than the last element that any lane reaches."""
        return super().end + self.reach


class Family(msgspec.Struct):
    """Ranks of one place along the axes that are not lanes.

    Attributes:
        tape: of its first rank, with windows that are shifted where lanes differ.
        samples: ranks that were run: (place along the lane axes, tape); the first is the tape's, the others are `slim`.
        varied: nodes of which whole numbers among the arguments differ between lanes: (argument's number, steps).
    """

    tape: Tape
    samples: list[tuple[Steps, Tape]]
    varied: dict[int, list[tuple[int, Steps]]] = {}


class _Other(NamedTuple):
    """A rank of a family that was run beside the first one."""

    spot: Steps
    tape: Tape
    differences: dict[tuple[str, int, int], int]


class World(msgspec.Struct):
    """All ranks.

    Attributes:
        mesh: its axes, slow → fast.
        lanes: numbers of its axes that are lanes.
        places: of each family, along the other axes.
        families: in the order of `places`.
    """

    mesh: Mesh
    lanes: tuple[int, ...]
    places: list[tuple[int, ...]]
    families: list[Family]

    @property
    def sizes(self) -> Steps:
        """Lanes along each lane axis."""
        return tuple(self.mesh.sizes[k] for k in self.lanes)

    def split(self, rank: int) -> tuple[int, Steps]:
        """Family and lane of a rank."""
        at = np.unravel_index(rank, self.mesh.sizes)
        return self.places.index(tuple(int(x) for k, x in enumerate(at) if k not in self.lanes)), tuple(int(at[k]) for k in self.lanes)

    def ran(self) -> list[int]:
        """Ranks that were run."""
        return sorted(tape.rank for family in self.families for _, tape in family.samples)


@uncollected()
def gathered(record: Record, mesh: Mesh, spread: Spread = here, *, alike: bool = True) -> World:
    """Run as many ranks as are needed.

    Args:
        record: gives the tapes of ranks.
        spread: where ranks are recorded.
        alike: look for ranks that follow from their places; without, each is a program of its own.

    Raises:
        OracleError: a rank's program cannot be recorded.
        Unlike: ranks of one family are not on a line.
    """
    far = [k for k, n in enumerate(mesh.sizes) if n > 1 and alike]
    probes = [{}, *({k: 1} for k in far)]
    known: dict[int, Tape] = {}
    for found in spread([functools.partial(_part, record, [_rank(mesh, at)]) for at in probes]):
        known.update(found)
    lanes = []
    for k in far:
        try:
            differences(known[0], known[_rank(mesh, {k: 1})], mesh)
            lanes.append(k)
        except Unlike:
            continue
    rest = [k for k in range(len(mesh.sizes)) if k not in lanes]
    places = list(itertools.product(*(range(mesh.sizes[k]) for k in rest)))
    sizes = tuple(mesh.sizes[k] for k in lanes)
    asked = [{spot: _rank(mesh, {**dict(zip(rest, place)), **dict(zip(lanes, spot))}) for spot in _spots(sizes)} for place in places]
    missing = {rank for ranks in asked for rank in ranks.values()} - known.keys()
    if len(missing) > MOST_RANKS:
        raise Unlike(f"{len(missing)} ranks would have to be run, since ranks along {', '.join(mesh.axes[k] for k in rest if mesh.sizes[k] > 1)} do other operations; the mesh's axes go slow to fast")
    world = World(mesh, tuple(lanes), places, [])
    calls = [functools.partial(_kin, record, ranks, {r: known[r] for r in ranks.values() if r in known}, mesh) for ranks in asked]
    del known
    for origin, others in spread(calls):
        if isinstance(origin, str):
            raise Unlike(origin)
        world.families.append(_joined(origin, others, sizes))
    return world


def _part(record: Record, ranks: Sequence[int]) -> dict[int, Tape]:
    return dict(zip(ranks, record(ranks)))


def _kin(record: Record, ranks: Mapping[Steps, int], known: dict[int, Tape], mesh: Mesh) -> tuple[Tape | str, list[_Other]]:
    """The first rank of a family and what sets others apart; the text alone where they are not alike."""
    spots = list(ranks)
    origin = known[ranks[spots[0]]] if ranks[spots[0]] in known else record([ranks[spots[0]]])[0]
    others = []
    for spot in spots[1:]:
        tape = known.pop(ranks[spot], None) or record([ranks[spot]])[0]
        try:
            others.append(_Other(spot, slim(origin, tape), differences(origin, tape, mesh)))
        except Unlike as why:
            return str(why), []
    return origin, others


def slim(origin: Tape, tape: Tape) -> Tape:
    """A rank's tape without its operations, which are the origin's; blocks have the numbers that the origin's operations give them."""
    blocks = list(tape.blocks)
    for m, n in zip(origin.nodes, tape.nodes):
        for v, w in zip(m.values, n.values):
            if v >= 0 and v != w:
                blocks.extend([None] * (v + 1 - len(blocks)))
                blocks[v] = tape.blocks[w]
    leaves = []
    for leaf in tape.leaves:
        blocks.append(tape.blocks[leaf.block])
        leaves.append(msgspec.structs.replace(leaf, block=len(blocks) - 1))
    return msgspec.structs.replace(tape, nodes=[], blocks=[np.zeros(0) if b is None else b for b in blocks], leaves=leaves)


def _rank(mesh: Mesh, at: Mapping[int, int]) -> int:
    return int(np.ravel_multi_index([at.get(k, 0) for k in range(len(mesh.sizes))], mesh.sizes)) if mesh.sizes else 0


def _spots(sizes: Steps) -> list[Steps]:
    """Lanes that are run: the first, the second along each axis, and the farthest corner."""
    found = [(0,) * len(sizes), *(tuple(int(j == k) for j in range(len(sizes))) for k in range(len(sizes)))]
    return list(dict.fromkeys([*found, tuple(n - 1 for n in sizes)]))


def _joined(origin: Tape, others: Sequence[_Other], sizes: Steps) -> Family:
    """What ranks on a line have in common.

    Raises:
        Unlike: they are not on one.
    """
    found = {other.spot: other.differences for other in others}
    samples = [((0,) * len(sizes), origin), *((other.spot, other.tape) for other in others)]
    keys = dict.fromkeys(key for one in found.values() for key in one)
    made = Family(msgspec.structs.replace(origin, nodes=[msgspec.structs.replace(n, ins=list(n.ins), outs=list(n.outs)) for n in origin.nodes], held=list(origin.held)), samples)
    for key in keys:
        steps = tuple(found.get(tuple(int(j == k) for j in range(len(sizes))), {}).get(key, 0) for k in range(len(sizes)))
        for spot, one in found.items():
            if one.get(key, 0) != sum(s * x for s, x in zip(steps, spot)):
                raise Unlike(f"{_said(origin, key)}: ranks are not on one line")
        _shift(made, key, steps, sizes)
    return made


def _said(tape: Tape, key: tuple[str, int, int]) -> str:
    if key[0] == "held":
        return f"parameter {tape.held[key[1]].name}"
    node = tape.nodes[key[1]]
    return f"{node.op} at {node.place or node.module}"


def _shift(made: Family, key: tuple[str, int, int], steps: Steps, sizes: Steps) -> None:
    what, at, k = key
    if what == "arg":
        made.varied.setdefault(at, []).append((k, steps))
        return

    def shifted(w: Window) -> Shifted:
        low = sum(min(0, s * (n - 1)) for s, n in zip(steps, sizes))
        if w.offset + low < 0:
            raise Unlike("a window before the storage's begin")
        return Shifted(w.storage, w.offset, w.size, w.stride, w.kind, steps, sum(max(0, s * (n - 1)) for s, n in zip(steps, sizes)))

    if what == "held":
        made.tape.held[at] = msgspec.structs.replace(made.tape.held[at], window=shifted(made.tape.held[at].window))
    elif what == "in":
        made.tape.nodes[at].ins[k] = shifted(made.tape.nodes[at].ins[k])
    else:
        out = made.tape.nodes[at].outs[k]
        assert out is not None
        made.tape.nodes[at].outs[k] = shifted(out)


def differences(one: Tape, two: Tape, mesh: Mesh) -> dict[tuple[str, int, int], int]:
    """By how much two ranks' offsets, and whole numbers among arguments, differ: ("in", "out", "arg" or "held", number, number within).

    Raises:
        Unlike: in anything else.
    """
    found: dict[tuple[str, int, int], int] = {}
    if len(one.nodes) != len(two.nodes) or [h.name for h in one.held] != [h.name for h in two.held]:
        raise Unlike("other operations or other parameters")
    for k, (x, y) in enumerate(zip(one.held, two.held)):
        _windows(found, ("held", k, 0), x.window, y.window)
    for at, (m, n) in enumerate(zip(one.nodes, two.nodes)):
        if m.op != n.op or m.detail != n.detail or len(m.ins) != len(n.ins) or len(m.outs) != len(n.outs) or (m.values != n.values and [v < 0 for v in m.values] != [v < 0 for v in n.values]):
            raise Unlike(f"{m.op} at {m.place or m.module} and {n.op}")
        if m.ins != n.ins:
            for k, (v, w) in enumerate(zip(m.ins, n.ins)):
                _windows(found, ("in", at, k), v, w)
        if m.outs != n.outs:
            for k, (p, q) in enumerate(zip(m.outs, n.outs)):
                if (p is None) != (q is None):
                    raise Unlike(f"{m.op}: other results")
                if p is not None and q is not None:
                    _windows(found, ("out", at, k), p, q)
        if m.args != n.args or m.kwargs != n.kwargs or m.ranks or n.ranks or collective(m.op) or m.op.split(".")[1] in RANDOM:
            _arguments(found, at, (m, one), (n, two), mesh)
    _leaves(one, two)
    return found


def _windows(found: dict[tuple[str, int, int], int], key: tuple[str, int, int], one: Window, two: Window) -> None:
    if (one.storage, one.size, one.stride, one.kind) != (two.storage, two.size, two.stride, two.kind):
        raise Unlike("a tensor of another shape")
    if one.offset != two.offset:
        found[key] = two.offset - one.offset


def _arguments(found: dict[tuple[str, int, int], int], at: int, one: tuple[Node, Tape], two: tuple[Node, Tape], mesh: Mesh) -> None:
    m, n = one[0], two[0]
    if m.ranks or n.ranks or collective(m.op):
        if axes_of(m.ranks, one[1].rank, mesh) != axes_of(n.ranks, two[1].rank, mesh):
            raise Unlike(f"{m.op}: a group along other axes")
        if m.op.startswith("c10d.") and m.op.split(".")[1].startswith(("send", "recv")):
            if offset_of(m, one[1].rank, mesh) != offset_of(n, two[1].rank, mesh):
                raise Unlike(f"{m.op}: a peer at another place")
            return
    if m.kwargs.keys() != n.kwargs.keys() or len(m.args) != len(n.args):
        raise Unlike(f"{m.op}: other arguments")
    pairs = [(k, a, b) for k, (a, b) in enumerate(zip(m.args, n.args))] + [(-1, m.kwargs[k], n.kwargs[k]) for k in m.kwargs]
    for k, a, b in pairs:
        if isinstance(a, dict) and isinstance(b, dict) and "r" in a and a.get("r") == b.get("r"):
            continue
        if a == b or (collective(m.op) and isinstance(a, str)):  # names of groups
            continue
        if k >= 0 and not collective(m.op) and type(a) is int and type(b) is int:
            found["arg", at, k] = b - a
            continue
        raise Unlike(f"{m.op} at {m.place or m.module}: an argument of {a!s:.40} and {b!s:.40}")
    if m.op.split(".")[1] in RANDOM:
        for v, w in zip(m.values, n.values):
            if v >= 0 and not np.array_equal(one[1].blocks[v], two[1].blocks[w]):
                raise Unlike(f"{m.op}: other random numbers")


def axes_of(ranks: tuple[int, ...], rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Numbers of the axes along which a group goes.

    Raises:
        Unlike: it is no such group.
    """
    return _axes_of(ranks, rank, tuple(mesh.sizes))


@functools.lru_cache(1 << 14)
def _axes_of(ranks: tuple[int, ...], rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not ranks:
        return tuple(range(len(sizes)))
    at = np.unravel_index(np.asarray(ranks), sizes)
    axes = tuple(k for k, x in enumerate(at) if len(np.unique(x)) > 1)
    here = np.unravel_index(rank, sizes)
    grid = np.arange(math.prod(sizes)).reshape(sizes)[tuple(slice(None) if k in axes else int(here[k]) for k in range(len(sizes)))]
    if list(ranks) != grid.reshape(-1).tolist():
        raise Unlike(f"a group of ranks {list(ranks)[:8]} that is not along axes of the mesh")
    return axes


def peer_of(node: Node) -> int:
    """The rank that a send goes to, or a receive comes from."""
    peer = int(node.args[2])
    return node.ranks[peer] if peer < len(node.ranks) else peer


def offset_of(node: Node, rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Where a peer is, from a rank."""
    return tuple(int(a) - int(b) for a, b in zip(np.unravel_index(peer_of(node), mesh.sizes), np.unravel_index(rank, mesh.sizes)))


def _leaves(one: Tape, two: Tape) -> None:
    """What a step begins with besides parameters has to be the same."""
    held = {h.window.storage for h in one.held}
    others = {leaf.storage: leaf for leaf in two.leaves}
    for leaf in one.leaves:
        other = others.get(leaf.storage)
        if other is None or one.blocks[leaf.block].size != two.blocks[other.block].size:
            raise Unlike("other data to begin with")
        if leaf.storage not in held and not np.array_equal(one.blocks[leaf.block], two.blocks[other.block]):
            raise Unlike("data of its own, not a part of what all ranks have: cut the whole batch on each rank")


def indices(family: Family, index: Mapping[tuple[int, str], Array], name: str, sizes: Steps) -> Array:
    """Which element of the reference's parameter each element of a part is: elements, then lanes (1 where all are the same).

    Raises:
        Unlike: parts are not on a line.
        OracleError: a part was not found in the reference.
    """
    rows: dict[Steps, Any] = {spot: index.get((tape.rank, name)) for spot, tape in family.samples}
    if any(row is None or (row < 0).any() for row in rows.values()):
        raise OracleError(f"{name}: its part of the reference was not found, or is padded")
    first = rows[family.samples[0][0]]
    found: Array = first.reshape(first.shape + (1,) * len(sizes))
    for k, n in enumerate(sizes):
        step = rows[tuple(int(j == k) for j in range(len(sizes)))] - first
        if step.any():
            found = found + step.reshape(step.shape + (1,) * len(sizes)) * np.arange(n).reshape(tuple(n if j == k else 1 for j in range(len(sizes))))
    for spot, row in rows.items():
        where: tuple[slice | int, ...] = (slice(None), *(x if found.shape[1 + j] > 1 else 0 for j, x in enumerate(spot)))
        here = found[where]
        if not np.array_equal(here, row):
            raise Unlike(f"{name}: parts are not on one line")
    return found
