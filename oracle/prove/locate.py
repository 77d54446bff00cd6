"""Where two programs part: the first operation whose result the reference never computes, though it computes all that goes in.

Relations between tensors are found, not annotated: in two finite fields an element has 62 random bits, so a tensor all of whose
elements occur in the reference is a part of it, however it is cut, moved or flattened; a sum over a group of ranks that occurs
there makes it a partial sum; one factor, a scaled one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from proctor.oracle.prove.domains.field import P
from proctor.oracle.prove.judge import Output, Runs
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.recording.operators import FRESH
from proctor.oracle.prove.tape import MARK, Array, Node, Tape, Window, collective
from proctor.oracle.prove.verdict import Culprit

_LOOK = 64  # elements that are looked up before the whole tensor is


class Observed:
    """What both sides computed in one domain: results by (rank, node), and results in between by (rank, node, number below 0)."""

    def __init__(self, reference: Tape, candidate: Sequence[Tape]) -> None:
        self.tapes = list(candidate)
        self.there: dict[tuple[int, int], list[Array]] = {}
        self.here: dict[tuple[int, int], list[Array]] = {}
        self.between: tuple[dict[tuple[int, int, int], Array], dict[tuple[int, int, int], Array]] = ({}, {})
        self.runs: Runs | None = None

    def reference(self, rank: int, node: int, values: list[Array], first: int) -> None:
        """Called for every node of the reference."""
        if first < 0:
            self.between[0][rank, node, first] = values[0].copy()
        else:
            self.there[rank, node] = [v.copy() for v in values]

    def candidate(self, rank: int, node: int, values: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        if first < 0:
            self.between[1][rank, node, first] = values[0].copy()
        else:
            self.here[rank, node] = [v.copy() for v in values]

    def keep(self, runs: Runs) -> None:
        """The finished runs."""
        self.runs = runs


class Status(NamedTuple):
    """What a tensor is to the reference: "whole" or a part of it, "partial" over ranks, "other"; times a factor."""

    kind: str
    ranks: tuple[int, ...] = ()
    factor: str = "1"


class _Both:
    """Elements of two fields as one key of 62 bits."""

    def __init__(self, observed: Sequence[Observed]) -> None:
        self._two = observed
        parts = [self._keys(values, again) for key, values in observed[0].there.items() for values, again in [(values, observed[1].there.get(key, []))]]
        leaves = [
            self._key(a.marks[0][m], b.marks[0][m]) for a, b in [(o.reference for o in (observed[0].runs, observed[1].runs) if o is not None)] for m in a.marks[0] if m in b.marks[0]
        ]
        self._known = np.unique(np.concatenate([*(p for part in parts for p in part), *leaves, self._small()]))
        self._groups = _groups(observed[0].tapes)
        sizes = sorted({len(g) for g in self._groups} | {len(observed[0].tapes), 2})
        self._factors = {f"{n}": n for n in sizes if n > 1} | {f"1/{n}": pow(n, -1, P) for n in sizes if n > 1} | {"-1": P - 1}
        self._seen: dict[tuple[int, int], Status] = {}

    def _small(self) -> Array:
        return self._key(np.array([0, 1, P - 1]), np.array([0, 1, P - 1]))

    def _keys(self, a: list[Array], b: list[Array]) -> list[Array]:
        return [self._key(x, y) for x, y in zip(a, b)]

    @staticmethod
    def _key(a: Array, b: Array) -> Array:
        return ((a.astype(np.int64) << 31) ^ b.astype(np.int64)).reshape(-1)

    def _all_known(self, a: Array, b: Array) -> bool:
        a, b = a.reshape(-1), b.reshape(-1)
        for cut in (slice(0, _LOOK), slice(_LOOK, None)):
            key = self._key(a[cut], b[cut])
            if key.size:
                at = np.minimum(np.searchsorted(self._known, key), len(self._known) - 1)
                if not (self._known[at] == key).all():
                    return False
        return True

    def _known_but_for_a_factor(self, a: Array, b: Array) -> str | None:
        if self._all_known(a, b):
            return "1"
        for text, f in self._factors.items():
            if self._all_known(a * pow(f, -1, P) % P, b * pow(f, -1, P) % P):
                return text
        return None

    def status(self, rank: int, node: int) -> Status:
        """Of the first result of a node."""
        if (rank, node) not in self._seen:
            self._seen[rank, node] = self._status(rank, node)
        return self._seen[rank, node]

    def _status(self, rank: int, node: int) -> Status:
        one, two = (o.here.get((rank, node)) for o in self._two)
        if not one or not two:
            return Status("whole")
        factor = self._worst([self._known_but_for_a_factor(a, b) for a, b in zip(one, two)])
        if factor is not None:
            return Status("whole", (), factor)
        for group in self._groups:
            if rank in group and len(group) > 1:
                found = self._worst([self._summed(group, node, k, a, b) for k, (a, b) in enumerate(zip(one, two))])
                if found is not None:
                    return Status("partial", group, found)
        return Status("other")

    @staticmethod
    def _worst(factors: list[str | None]) -> str | None:
        return None if None in factors else next((f for f in factors if f != "1"), "1")

    def _summed(self, group: tuple[int, ...], node: int, k: int, a: Array, b: Array) -> str | None:
        """The factor with which a result is a partial sum of the reference's, or the reference's."""
        sums = [self._total(group, node, k, a.shape, o) for o in self._two]
        if sums[0] is None or sums[1] is None:
            return None
        return self._known_but_for_a_factor(sums[0], sums[1]) or self._known_but_for_a_factor(a, b)

    def _total(self, group: tuple[int, ...], node: int, k: int, shape: tuple[int, ...], seen: Observed) -> Array | None:
        if any(node >= len(seen.tapes[r].nodes) for r in group) or len({seen.tapes[r].nodes[node].op for r in group}) > 1:
            return None
        parts = [values[k] for r in group if len(values := seen.here.get((r, node), [])) > k]
        if len(parts) < len(group) or any(p.shape != shape for p in parts):
            return None
        return np.asarray(sum(np.where(p < 0, 0, p) for p in parts)) % P


def _groups(tapes: Sequence[Tape]) -> list[tuple[int, ...]]:
    found = {node.ranks for tape in tapes for node in tape.nodes if node.ranks and len(node.ranks) <= len(tapes)}
    return sorted(found | {tuple(range(len(tapes)))}, key=lambda g: (len(g), g))


class Flow:
    """Who made what a node reads, on one rank; memory that is fresh was made by nobody. `taken`: by which of its inputs it reads each."""

    def __init__(self, tape: Tape) -> None:
        written: dict[int, list[tuple[int, int, int]]] = {}
        self.makers: list[list[int]] = []
        self.taken: list[list[int]] = []
        for at, node in enumerate(tape.nodes):
            found = [(maker, k) for k, w in enumerate(node.ins) if w.kind == "f" for maker in _makers(written, w)]
            self.makers.append([maker for maker, _ in found])
            self.taken.append([k for _, k in found])
            for w in () if node.op.split(".")[1] in FRESH else node.outs:
                if w is not None and w.kind == "f" and w.numel:
                    written.setdefault(w.storage, []).append((w.offset, w.end, at))


def _makers(written: dict[int, list[tuple[int, int, int]]], w: Window) -> Iterator[int]:
    for start, end, at in reversed(written.get(w.storage, [])):
        if start < w.end and end > w.offset:
            yield at
            if start <= w.offset and end >= w.end:
                return


def locate(observed: Sequence[Observed], alignment: Alignment, doubles: Runs, wrong: Sequence[Output]) -> Culprit:
    """Name the operation.

    Args:
        observed: both fields' runs.
        wrong: outputs that differ, at least one.
    """
    both, tapes = _Both(observed), observed[0].tapes
    flows = [Flow(tape) for tape in tapes]
    starts = _starts(tapes, alignment, wrong)
    frontier = _frontier(both, tapes, flows, starts)
    factors = [o.factor for o in wrong if o.what == "grad"]
    if factors and factors[0] and all(abs(f - factors[0]) <= 1e-4 * abs(factors[0]) for f in factors):
        # the update only carries on what it was given
        frontier = [(rank, at) for rank, at in frontier if tapes[rank].nodes[at].phase != "update"]
    if frontier:
        first = min(frontier, key=lambda k: (_late(tapes[k[0]].nodes[k[1]]), k[1], k[0]))
        odd = [] if tapes[first[0]].nodes[first[1]].module else _odd_ones(wrong)
        if odd:
            return _of_gradient(both, tapes, flows, odd[0], tapes[first[0]].nodes[first[1]])
        return _described(both, tapes, flows, *first)
    return _of_outputs(both, tapes, flows, starts, wrong)


def _odd_ones(wrong: Sequence[Output]) -> list[Output]:
    """Where clipping carries one gradient's mistake to all, all but that one differ by one factor."""
    grads = [o for o in wrong if o.what == "grad"]
    common = [o.factor for o in grads if o.factor]
    if 2 * len(common) <= len(grads):
        return []
    middle = sorted(common)[len(common) // 2]
    return [o for o in grads if not o.factor or abs(o.factor - middle) > 1e-4 * abs(middle)]


def _of_gradient(both: _Both, tapes: Sequence[Tape], flows: Sequence[Flow], output: Output, node: Node) -> Culprit:
    """A gradient that is wrong by itself, and what made it, if that is a partial sum."""
    rank, module = output.rank, output.name.rpartition(".")[0]
    here = tapes[rank]
    for at, other in enumerate(here.nodes):
        for maker in flows[rank].makers[at] if other.phase != "backward" and collective(other.op) is False and other.op != MARK else ():
            status = both.status(rank, maker)
            if status.kind == "partial" and here.nodes[maker].phase == "backward" and here.nodes[_origin(both, here, flows[rank], maker)].module == module:
                made = here.nodes[_origin(both, here, flows[rank], maker)]
                said = f"a collective is missing: the gradient of {output.name}, made by {_named(made)}, is a partial sum over ranks {list(status.ranks)}"
                return Culprit("missing collective", module, made.op, made.place, made.phase, status.ranks, said, output.name)
    said = f"the gradient of {output.name} is wrong on rank {rank}; {_named(node)} carries it to the others"
    return Culprit("", module, node.op, node.place, node.phase, (rank,), said, output.name)


def _late(node: Node) -> int:
    return {"forward": 0, "backward": 1}.get(node.phase, 2)


def _starts(tapes: Sequence[Tape], alignment: Alignment, wrong: Sequence[Output]) -> list[tuple[int, int, Output]]:
    found = []
    for output in wrong:
        for at, node in enumerate(tapes[output.rank].nodes):
            what, _, own = node.detail.partition(" ")
            if node.op == MARK and what == output.what and alignment.of.get((output.rank, own)) == output.name:
                found.append((output.rank, at, output))
                break
    return found


def _frontier(both: _Both, tapes: Sequence[Tape], flows: Sequence[Flow], starts: Sequence[tuple[int, int, Output]]) -> list[tuple[int, int]]:
    todo = [(rank, maker) for rank, at, _ in starts for maker in flows[rank].makers[at]]
    seen, frontier = set(todo), []
    while todo:
        rank, at = todo.pop()
        if both.status(rank, at).kind != "other":
            continue
        before = [(r, m) for r, n in _members(tapes, rank, at) for m in flows[r].makers[n]]
        if all(both.status(r, m).kind != "other" for r, m in before):
            frontier.append((rank, at))
        for key in before:
            if key not in seen:
                seen.add(key)
                todo.append(key)
    return frontier


def _members(tapes: Sequence[Tape], rank: int, at: int) -> list[tuple[int, int]]:
    """The same collective on all of its ranks, found by its turn in the group."""
    node = tapes[rank].nodes[at]
    if not collective(node.op) or len(node.ranks) < 2:
        return [(rank, at)]
    turn = sum(1 for n in tapes[rank].nodes[:at] if collective(n.op) and n.ranks == node.ranks)
    found = []
    for r in node.ranks:
        mine = [k for k, n in enumerate(tapes[r].nodes) if collective(n.op) and n.ranks == node.ranks] if r < len(tapes) else []
        if turn < len(mine):
            found.append((r, mine[turn]))
    return found


def _described(both: _Both, tapes: Sequence[Tape], flows: Sequence[Flow], rank: int, at: int) -> Culprit:
    node = tapes[rank].nodes[at]
    before = [(m, both.status(rank, m)) for m in flows[rank].makers[at]]
    partial = [(m, s) for m, s in before if s.kind == "partial"]
    scaled = [(m, s) for m, s in before if s.factor != "1"]
    if partial and not collective(node.op):
        maker, status = partial[0]
        maker = _origin(both, tapes[rank], flows[rank], maker)
        made = tapes[rank].nodes[maker]
        said = f"a collective is missing: {_named(made)} gives a partial sum over ranks {list(status.ranks)}, and {_named(node)} takes it for the whole"
        parameter = _gradient_of(both, tapes[rank], flows[rank], maker)
        if parameter:
            said += f": the gradient of {parameter} is not reduced"
        module = made.module or parameter.rpartition(".")[0] or node.module
        return Culprit("missing collective", module, made.op, made.place or node.place, made.phase, status.ranks, said, parameter)
    if collective(node.op):
        return _of_collective(node, both.status(rank, at), partial, before)
    given = sum(1 for w in node.ins if w.kind == "f")
    if scaled and (len({s.factor for _, s in before}) > 1 or given > len(before) or node.phase != "backward"):
        return _of_scale(both, tapes, flows, rank, node, scaled[0][0])
    said = f"{_named(node)} on rank {rank} is the first result that the reference does not compute; what goes in is the reference's"
    return Culprit("", node.module, node.op, node.place, node.phase, (rank,), said)


def _origin(both: _Both, tape: Tape, flow: Flow, at: int) -> int:
    """Where a partial sum, or a factor, comes from: the first operation in a row of those that have it."""
    status = both.status(tape.rank, at)
    while True:
        before = [m for m in flow.makers[at] if m < at and both.status(tape.rank, m)[1:] == status[1:] and both.status(tape.rank, m).kind == status.kind]
        if not before or (status.kind == "whole" and status.factor == "1"):
            return at
        at = before[0]


def _gradient_of(both: _Both, tape: Tape, flow: Flow, origin: int) -> str:
    """The parameter whose gradient an operation makes, as it is when the optimizer takes it; "" when it makes none."""
    for at, node in enumerate(tape.nodes):
        gradient = node.op == MARK and node.detail.startswith("grad ")
        if gradient and any(m == origin or _leads_to(flow, m, origin) for m in flow.makers[at]):
            return node.detail[5:]
    return ""


def _leads_to(flow: Flow, at: int, origin: int) -> bool:
    """Whether a few operations in a row, each on one tensor alone or in place, lead from one to another."""
    for _ in range(6):
        before = {m for m in flow.makers[at] if m < at}
        if origin in before:
            return len(before) <= 2
        if not before:
            return False
        at = max(before)
    return False


def _of_scale(both: _Both, tapes: Sequence[Tape], flows: Sequence[Flow], rank: int, node: Node, maker: int) -> Culprit:
    """A multiple of what the reference has is added to what is none."""
    at = _origin(both, tapes[rank], flows[rank], maker)
    made, factor = tapes[rank].nodes[at], both.status(rank, maker).factor
    whole = all(both.status(rank, m) == Status("whole") for m in flows[rank].makers[at])
    takes = f"{node.detail} is that" if node.op == MARK else f"{_named(node)} takes it for the whole"
    if collective(made.op) and whole and flows[rank].makers[at]:
        said = f"doubled: {_named(made)} over ranks {list(made.ranks)} reduces what every one of them has whole, and gives {factor} times the reference's"
        return Culprit("doubled", made.module, made.op, made.place, made.phase, made.ranks, said)
    said = f"wrong scale: {_named(made)} gives {factor} times the reference's, and {takes}"
    return Culprit("wrong scale", made.module or node.module, made.op, made.place or node.place, made.phase, (rank,), said)


def _of_collective(node: Node, status: Status, partial: list[tuple[int, Status]], before: list[tuple[int, Status]]) -> Culprit:
    group = list(node.ranks)
    if partial and partial[0][1].ranks != node.ranks:
        said = f"wrong group: {_named(node)} is over ranks {group}, its input is a partial sum over {list(partial[0][1].ranks)}"
        return Culprit("wrong group", node.module, node.op, node.place, node.phase, node.ranks, said)
    if status.factor not in ("1", "-1") and before and all(s.kind == "whole" and s.factor == "1" for _, s in before):
        said = f"doubled: {_named(node)} over ranks {group} reduces what every one of them has whole"
        return Culprit("doubled", node.module, node.op, node.place, node.phase, node.ranks, said)
    said = f"{_named(node)} over ranks {group} is the first result that the reference does not compute"
    return Culprit("wrong collective", node.module, node.op, node.place, node.phase, node.ranks, said)


def _of_outputs(both: _Both, tapes: Sequence[Tape], flows: Sequence[Flow], starts: Sequence[tuple[int, int, Output]], wrong: Sequence[Output]) -> Culprit:
    """Every step is the reference's, yet an output is not: it is a part of a sum, a multiple, or something else of the reference."""
    for rank, at, output in starts:
        module = output.name.rpartition(".")[0]
        for maker in flows[rank].makers[at]:
            node, status = tapes[rank].nodes[maker], both.status(rank, maker)
            where = f"{output.what} {output.name} of rank {rank}, made by {_named(node)},"
            if status.kind == "partial":
                node = tapes[rank].nodes[_origin(both, tapes[rank], flows[rank], maker)]
                said = f"a collective is missing: {where} is a partial sum over ranks {list(status.ranks)} that nobody adds up"
                return Culprit("missing collective", module, node.op, node.place, node.phase, status.ranks, said, output.name)
            if status.factor != "1":
                found = _of_scale(both, tapes, flows, rank, tapes[rank].nodes[at], maker)
                found.parameter = output.name
                return found
            if status.kind == "whole":
                said = f"{where} holds other values of the reference: another part, or one that it should not have"
                return Culprit("wrong part", module, node.op, node.place, node.phase, (rank,), said)
    stays = next(((rank, output) for rank, at, output in starts if output.what == "after" and not flows[rank].makers[at]), None)
    if stays is not None:
        rank, output = stays
        last = next((n for n in reversed(tapes[rank].nodes) if n.phase == "update" and n.op != MARK), Node(""))
        said = f"{output.name} stays as it was on rank {rank}: nothing there updates it, and no collective brings what other ranks computed"
        return Culprit("missing collective", output.name.rpartition(".")[0], last.op, last.place, "update", (rank,), said, output.name)
    output = wrong[0]
    scale = f": {output.factor:.6g} times the reference's" if output.factor else ""
    return Culprit("", output.name.rpartition(".")[0], said=f"{output.what} {output.name} of rank {output.rank}{scale}")


def _named(node: Node) -> str:
    place = f" at {node.place}" if node.place else ""
    inside = f" in {node.module}" if node.module else ""
    return f"{node.op}{inside} ({node.phase}){place}"
