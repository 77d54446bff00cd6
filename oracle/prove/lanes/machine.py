"""Runs families of ranks: each operation once for all ranks of a family, with all their values.

Integers are concrete. Where they differ between lanes, an operation that takes them is done lane by lane, and they themselves are
computed by torch, from the integers and (in doubles) floats of each lane, and compared with what the ranks that were run had.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from proctor.oracle.prove import collectives, meanings
from proctor.oracle.prove.by_torch import called, called_many, tensor_of
from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.lanes import batched
from proctor.oracle.prove.lanes.domain import (
    Lanes,
    Wide,
    at_lane,
    common,
    lanes_of,
    packed,
    places,
    values,
    widened,
)
from proctor.oracle.prove.lanes.family import Family, Unlike, World, axes_of
from proctor.oracle.prove.lanes.storages import Storages
from proctor.oracle.prove.machine import IGNORED, Misfit, Seen, Stuck, _Rank, literal
from proctor.oracle.prove.meanings import Floats
from proctor.oracle.prove.recording.operators import RANDOM
from proctor.oracle.prove.tape import Array, Node, Window, last_uses

Integers = dict[tuple[int, int], list[Array | None]]
# Operators whose meanings are the domain's arithmetic alone, which takes arrays of other lanes as they are.
_ARITHMETIC: Final = frozenset({
    "mm", "bmm", "matmul", "addmm", "linear", "mul", "add", "sub", "rsub", "div", "neg", "square", "pow", "rsqrt", "sqrt", "silu", "silu_backward", "sigmoid_backward",
    "tanh_backward", "_softmax", "_softmax_backward_data", "addcdiv", "lerp", "copy", "sum", "mean", "clone", "_to_copy", "_unsafe_view", "detach", "alias",
})  # fmt: skip
_Group = tuple[tuple[int, ...], tuple[tuple[int, tuple[int | None, ...]], ...]]


class LaneMachine(Storages):
    """See the module.

    Args:
        world: all ranks; with no lanes, one family is one rank.
        integers: what a run in doubles computed, for one in a field; filled in doubles.
        seen: as of `Machine`, with families for ranks.
    """

    def __init__(self, world: World, domain: Wide, leaves: Mapping[tuple[int, int], Array], integers: Integers, seen: Seen | None = None) -> None:
        super().__init__(world, domain, leaves, seen)
        self.integers = integers
        self.only: list[set[int]] | None = None  # operations of each family; others are left out
        self.checked = self.apart = 0
        self._at: tuple[int | None, ...] = (None,) * self._axes
        self._now: list[Array | None] | None = None
        self._known_groups: dict[tuple[int, tuple[int, ...]], _Group] = {}
        self._joint: dict[tuple[_Group, int], dict[int, Node]] = defaultdict(dict)
        self._turns: list[dict[_Group, int]] = [defaultdict(int) for _ in world.families]
        self._last = [last_uses(rank.tape) for rank in self._ranks]

    def _do(self, r: int, rank: _Rank, node: Node) -> bool:
        if self.only is not None and rank.at not in self.only[r]:
            return True
        self._laned.lanes = self._one
        done = (not rank.pending and self._quick(r, rank, node)) or super()._do(r, rank, node)
        if done:
            for storage in self._last[r].get(rank.at, ()):
                rank.storages.pop(storage, None)
        return done

    def _quick(self, r: int, rank: _Rank, node: Node) -> bool:
        """Do what most operations are: arithmetic of floats. False where it is none."""
        means = _arithmetic(node.op)
        if means is None or len(node.outs) != 1 or max(node.values, default=-1) >= 0 or rank.at in self.world.families[r].varied:
            return False
        out, cx, ins = node.outs[0], self._cx, node.ins
        if out is None or 0 in out.size:
            return False
        for w in ins:
            if w.kind != "f":
                return False
        cx.sizes, cx.recorded, cx.inner = [out.size], [None], self._between(r, rank.at) if self._seen else None
        try:
            args = [Floats(self.read(r, ins[a["t"]])) if type(a) is dict and "t" in a else self._argument(r, rank, node, a) for a in node.args]
            found = means(cx, *args, **{k: self._argument(r, rank, node, a) for k, a in node.kwargs.items() if k not in IGNORED and a is not None})
        except (NotImplementedError, TypeError, ValueError, IndexError):
            return False  # it is tried with all lanes, and else is opaque
        self._keep(rank, node, out, np.asarray(found))
        self._tell(r, rank.at, [out])
        return True

    # -- other ranks

    def peer(self, node: Node) -> int:
        """The family that a send goes to, or a receive comes from."""
        which, lane = self.world.split(super().peer(node))
        if any(lane):
            raise NotImplementedError(f"{node.op} to another place along an axis of lanes")
        return which

    def group(self, r: int, node: Node) -> _Group:
        """Axes of a collective's group, and who is in it."""
        key = r, node.ranks
        if key not in self._known_groups:
            mesh, world = self.world.mesh, self.world
            axes = axes_of(node.ranks, self._ranks[r].tape.rank, mesh)
            here = np.unravel_index(self._ranks[r].tape.rank, mesh.sizes) if mesh.sizes else ()
            members = []
            for at in itertools.product(*(range(n) if k in axes else [int(here[k])] for k, n in enumerate(mesh.sizes))):
                which = world.places.index(tuple(x for k, x in enumerate(at) if k not in world.lanes))
                members.append((which, tuple(at[k] if k in axes else None for k in world.lanes)))
            self._known_groups[key] = axes, tuple(members)
        return self._known_groups[key]

    def _join(self, r: int, node: Node) -> bool:
        group = self.group(r, node)
        if (r, self._ranks[r].at) in self._finished:
            self._finished.discard((r, self._ranks[r].at))
            self._turns[r][group] += 1
            return True
        there = self._joint[group, self._turns[r][group]]
        there[r] = node
        families = dict.fromkeys(which for which, _ in group[1])
        if len(there) < len(families):
            return False
        if len({n.op for n in there.values()}) > 1:
            raise Stuck({m: f"is in {there[m].op} of ranks {list(node.ranks)[:8]} at {there[m].place or there[m].module}" for m in families})
        self._meet(group[1], there)
        for m in families:
            if m != r:
                self._finished.add((m, self._ranks[m].at))
        self._turns[r][group] += 1
        return True

    def _meet(self, members: Sequence[tuple[int, tuple[int | None, ...]]], nodes: Mapping[int, Node]) -> None:
        """A collective: each member has its own lanes' values, and the lanes along the group's axes are members."""
        node = next(iter(nodes.values()))
        means = collectives.find(node.op)
        if means is None:
            raise NotImplementedError(f"collective {node.op}")
        cut = [any(at[k] is not None for _, at in members) for k in range(self._axes)]
        inputs = {(which, w): self.read(which, w) for which, n in nodes.items() for w in n.ins}
        floats = common((lanes_of(a, self._axes) for (_, w), a in inputs.items() if w.kind == "f"), self._axes)
        self._laned.lanes = tuple(1 if cut[k] else n for k, n in enumerate(floats))
        if any(n > 1 and not cut[k] for (_, w), a in inputs.items() if w.kind != "f" for k, n in enumerate(lanes_of(a, self._axes))):
            raise NotImplementedError(f"{node.op} of integers that differ along another axis")
        spread = {key: values(a, self._axes) for key, a in inputs.items()}

        def read(member: int, w: Window) -> Array:
            which, at = members[member]
            a = packed(at_lane(spread[which, w], at), self._axes)
            return widened(a, self._laned.lanes) if w.kind == "f" else a

        joint = collectives.Joint(self.d, [nodes[which] for which, _ in members], read)
        if odd := collectives.misfit(joint):
            raise Misfit({0: f"{node.op} over {joint.size} ranks {odd}, at {node.place or node.module}"})
        found: dict[int, list[tuple[tuple[int | None, ...], list[tuple[Window, Array]]]]] = defaultdict(list)
        for (which, at), written in zip(members, means(joint)):
            found[which].append((at, list(written)))
        for which, parts in found.items():
            for k, (w, first) in enumerate(parts[0][1]):
                self._write(self._ranks[which], w, first if all(p[k][1] is first for _, p in parts) else self._side_by_side([(at, p[k][1]) for at, p in parts], cut))
            self._tell(which, self._ranks[which].at, [w for w, _ in parts[0][1] if w.kind == "f" and w.numel])

    def _side_by_side(self, parts: Sequence[tuple[tuple[int | None, ...], Array]], cut: Sequence[bool]) -> Array:
        """Results of members as lanes of one array."""
        first = values(np.asarray(parts[0][1]), self._axes)
        shape = first.shape[: first.ndim - self._axes]
        most = common((lanes_of(np.asarray(a), self._axes) for _, a in parts), self._axes)
        made = np.zeros((*shape, *(self.world.sizes[k] if cut[k] else n for k, n in enumerate(most))), first.dtype)
        for at, a in parts:
            made[(..., *(slice(None) if x is None else slice(x, x + 1) for x in at))] = values(np.asarray(a), self._axes).reshape((*shape, *lanes_of(np.asarray(a), self._axes)))
        return packed(made, self._axes)

    # -- one family

    def _compute(self, r: int, rank: _Rank, node: Node) -> None:
        taken = [(w, self._lanes_at(rank, w)) for w in node.ins]
        again = self._again(r, rank, node, taken) if any(v >= 0 for v in node.values) else None
        loop = common([n for w, n in taken if w.kind != "f"] + self._varied(r, rank.at) + [lanes_of(a, self._axes) for a in again or () if a is not None], self._axes)
        numbers = [lanes_of(rank.reads[n], self._axes) for n in _numbers(node) if n in rank.reads] if rank.reads else []
        floats = common([n for w, n in taken if w.kind == "f"] + numbers, self._axes)
        wanted = [k for k, w in enumerate(node.outs) if w is not None and node.values[k] < 0 and w.numel]
        results: list[Array | None] = [None] * len(node.outs)
        if wanted:
            results = self._by_lane(r, rank, node, wanted, (loop, floats), again)
        self._laned.lanes = self._one
        for k, w in enumerate(node.outs):
            if w is None:
                continue
            if node.values[k] >= 0:
                found = again[k] if again is not None else None
                self._write(rank, w, self._known(rank.tape.blocks[node.values[k]], w) if found is None else _literals(self._laned.of, found, self._axes) if w.kind == "f" else found)
            elif w.numel:
                result = results[k]
                if result is not None:
                    self._keep(rank, node, w, np.asarray(result))
        self._tell(r, rank.at, [w for k in wanted if (w := node.outs[k]) is not None and w.kind == "f"])

    def _known(self, block: Array, w: Window) -> Array:
        return np.asarray(block.astype(np.int64) if w.kind != "f" else self.literal(block)).reshape(w.size)

    def _by_lane(self, r: int, rank: _Rank, node: Node, wanted: list[int], lanes: tuple[Lanes, Lanes], again: list[Array | None] | None) -> list[Array | None]:
        """Results; where integers differ, lane by lane."""
        loop, floats = lanes
        self._laned.lanes = tuple(1 if loop[k] > 1 else n for k, n in enumerate(floats))
        if max(loop, default=1) == 1:
            self._now = again
            return self._meant(r, rank, node, wanted)
        cut = [n > 1 for n in loop]
        if again is None and (at_once := self._at_once(r, rank, node, (cut, loop))) is not None:
            return at_once
        parts: list[list[tuple[tuple[int | None, ...], Array]]] = [[] for _ in node.outs]
        for at in places(loop):
            self._at = at
            self._now = None if again is None else [None if a is None else self._part(a) for a in again]
            for k, found in enumerate(self._meant(r, rank, self._placed(r, rank.at, node, at), wanted)):
                if found is not None and k in wanted:
                    parts[k].append((at, np.asarray(found)))
        self._at, self._now = (None,) * self._axes, None
        return [self._side_by_side(part, cut) if part else None for part in parts]

    def _at_once(self, r: int, rank: _Rank, node: Node, loop: tuple[list[bool], Lanes]) -> list[Array | None] | None:
        """Results on lanes whose integers differ, by a rule of `batched.py`; None where there is none, or who looks on wants each lane."""
        means, by, axes = meanings.find(node.op), batched.find(node.op), self._axes
        if means is None or by is None or len(node.outs) != 1 or node.outs[0] is None or self._seen or self._named or rank.at in self.world.families[r].varied:
            return None
        (cut, lanes), cx, rest = loop, self._cx, self._laned.lanes
        cx.sizes, cx.inner, cx.recorded = [(math.prod(n for n, c in zip(lanes, cut) if c), *node.outs[0].size)], None, [None]

        def given(value: Any) -> Any:
            if isinstance(value, dict) and "t" in value and (w := node.ins[value["t"]]).kind != "f":
                whole = batched.first(values(self.read(r, w), axes), cut, lanes).reshape(-1, *w.size)
                return whole.astype(bool) if w.kind == "b" else whole
            found = self._argument(r, rank, node, value)
            return Floats(packed(batched.first(values(found.a, axes), cut, lanes), axes)) if isinstance(found, Floats) else found

        try:
            self._laned.lanes = tuple(n if c else m for c, n, m in zip(cut, lanes, rest))
            arguments, named = [given(a) for a in node.args], {k: given(v) for k, v in node.kwargs.items() if k not in IGNORED and v is not None}
            self._laned.lanes = rest
            found = by(cx, means, arguments, named)
        except (NotImplementedError, TypeError, ValueError, IndexError):
            return None
        finally:
            self._laned.lanes = rest
        return [packed(batched.last(values(np.asarray(found), axes), cut, lanes), axes)]

    def _varied(self, r: int, at: int) -> list[Lanes]:
        """Lanes on which a node has arguments of its own."""
        return [tuple(n if s else 1 for n, s in zip(self.world.sizes, steps)) for _, steps in self.world.families[r].varied.get(at, [])]

    def _placed(self, r: int, at: int, node: Node, lane: Sequence[int | None]) -> Node:
        """A node with the arguments of a lane."""
        varied = self.world.families[r].varied.get(at)
        if not varied:
            return node
        arguments = list(node.args)
        for k, steps in varied:
            arguments[k] = arguments[k] + sum(s * (x or 0) for s, x in zip(steps, lane))
        return msgspec.structs.replace(node, args=arguments)

    def _part(self, a: Array) -> Array:
        return packed(at_lane(values(a, self._axes), self._at), self._axes)

    def _recorded(self, r: int, rank: _Rank, node: Node) -> list[Array | None]:
        now = self._now or [None] * len(node.values)
        return [(rank.tape.blocks[v] if a is None else a.reshape(-1)) if v >= 0 else None for v, a in zip(node.values, now)]

    def _argument(self, r: int, rank: _Rank, node: Node, value: Any) -> Any:
        if isinstance(value, dict) and ("c" in value or "z" in value):
            raise NotImplementedError("complex numbers on many ranks at once")
        if isinstance(value, dict) and "t" in value:
            w = node.ins[value["t"]]
            a = self.read(r, w)
            if any(x is not None for x in self._at):
                a = self._part(a)
            return Floats(widened(a, self._laned.lanes)) if w.kind == "f" else (a.astype(bool) if w.kind == "b" else a)
        if isinstance(value, dict) and "r" in value and value["r"] in rank.reads:
            a = rank.reads[value["r"]]
            return Floats(widened(self._part(a) if any(x is not None for x in self._at) else a, self._laned.lanes))
        return super()._argument(r, rank, node, value)

    # -- integers

    def _again(self, r: int, rank: _Rank, node: Node, taken: Sequence[tuple[Window, Lanes]]) -> list[Array | None] | None:
        """Integers that lanes have of their own, computed; None where they are as recorded."""
        family = self.world.families[r]
        computed = any(w.kind == "f" and w.numel for w, _ in taken) and any(w is not None and w.kind != "f" for w in node.outs)
        if node.op.split(".")[1] in RANDOM or not (rank.at in family.varied or computed or any(n > 1 for _, lanes in taken for n in lanes)):
            return None
        if self.d.name != "f64" and (r, rank.at) in self.integers:
            return self.integers[r, rank.at]
        if self.d.name != "f64" and from_floats(node):
            raise NotImplementedError(f"{node.op} at {node.place}: integers that are made of floats are those of doubles")
        spread, own = common([lanes for _, lanes in taken], self._axes), common(self._varied(r, rank.at), self._axes)
        inputs = [values(self.read(r, w), self._axes) for w in node.ins]
        joint = [n > 1 and own[k] == 1 for k, n in enumerate(spread)]  # lanes that are done together
        spread = tuple(max(n, m) for n, m in zip(spread, own))
        parts: list[list[tuple[tuple[int | None, ...], Array]]] = [[] for _ in node.outs]
        for at in places(tuple(1 if j else n for j, n in zip(joint, spread))):
            for k, found in enumerate(self._by_torch(self._placed(r, rank.at, node, at), [at_lane(a, at) for a in inputs], joint, spread)):
                if found is not None and node.values[k] >= 0:
                    parts[k].append((at, found))
        result = [self._side_by_side(part, [n > 1 and not j for n, j in zip(spread, joint)]) if part else None for part in parts]
        self._compare(family, rank.at, result, computed)
        self.integers[r, rank.at] = result
        return result

    def _by_torch(self, node: Node, inputs: Sequence[Array], joint: Sequence[bool], lanes: Lanes) -> list[Array | None]:
        """An operation by torch's kernel: results on lanes that are done together, which stand behind."""
        if any(joint):
            wide = [any(j and n > 1 for j, n in zip(joint, a.shape[a.ndim - self._axes :])) for a in inputs]
            tensors = [tensor_of((batched.first(a, joint, lanes) if many else a).reshape(*([-1] if many else []), *w.size), w.kind) for a, many, w in zip(inputs, wide, node.ins)]
            if (found := called_many(node, tensors, wide)) is not None:
                return [None if a is None else packed(batched.last(a.reshape(a.shape + (1,) * self._axes), joint, lanes), self._axes) for a in found]
        parts: list[list[tuple[tuple[int | None, ...], Array]]] = [[] for _ in node.outs]
        for at in places(tuple(n if j else 1 for j, n in zip(joint, lanes))):
            for k, one in enumerate(called(node, [tensor_of(at_lane(a, at).reshape(w.size), w.kind) for a, w in zip(inputs, node.ins)])):
                if one is not None:
                    parts[k].append((at, one))
        return [self._side_by_side(part, joint) if part else None for part in parts]

    def _compare(self, family: Family, at: int, found: Sequence[Array | None], computed: bool) -> None:
        """What was computed with what the ranks had. On a fake process group they have not the floats that others sent them."""
        for spot, tape in family.samples:
            for k, slot in enumerate(family.tape.nodes[at].values):
                a = found[k] if k < len(found) else None
                if slot < 0 or a is None:
                    continue
                here = np.asarray(packed(at_lane(values(a, self._axes), spot), self._axes)).reshape(-1)
                self.checked += 1
                if not np.allclose(here, tape.blocks[slot].astype(here.dtype), rtol=1e-6):
                    if not computed:
                        raise Unlike(f"{family.tape.nodes[at].op} at {family.tape.nodes[at].place}: rank {tape.rank} has other integers than follow from its place")
                    self.apart += 1


@functools.lru_cache(1024)
def _arithmetic(op: str) -> meanings.Meaning | None:
    """Meaning of an operator that is arithmetic."""
    base, many = meanings.base_of(op)
    return meanings.find(op) if base in _ARITHMETIC and not many else None


def _literals(domain: Domain, found: Array, axes: int) -> Array:
    """Recorded floats of all lanes as a domain's elements."""
    v = values(found, axes)
    return packed(np.asarray(literal(domain, v.reshape(-1))).reshape(v.shape), axes)


def _numbers(node: Node) -> list[int]:
    return [v["r"] for v in (*node.args, *node.kwargs.values()) if isinstance(v, dict) and "r" in v]


def from_floats(node: Node) -> bool:
    """Whether numbers that are taken as recorded may come from floats, so that they are those that doubles give."""
    return max(node.values, default=-1) >= 0 and any(w.kind == "f" and w.numel for w in node.ins)
