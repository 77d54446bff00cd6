"""Runs the tapes of all ranks together in a domain: node by node, collectives when all of their ranks have arrived.

A rank runs until it needs another one. What is received is waited for when it is used, as a program does that starts a
transfer and waits later. Nothing here knows what is proved; `Machine.run` leaves what was marked, by rank.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from proctor.oracle.prove import collectives, meanings
from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.meanings import Context, Floats, Pairs
from proctor.oracle.prove.numbers import written_down
from proctor.oracle.prove.tape import ABSENT, COMPLEX, MARK, READ, Array, Node, Tape, Window, collective

Leaves = Mapping[tuple[int, int], Array]  # (rank, storage) → elements
Seen = Callable[[int, int, list[Array], int], None]


class Stuck(Exception):
    """Ranks wait for each other. `where`: by rank, what each waits in."""

    kind, why = "ranks wait", "the ranks wait for each other: their collectives do not match"

    def __init__(self, where: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"rank {r}: {text}" for r, text in where.items()))
        self.where = dict(where)

    def __reduce__(self) -> tuple[type[Stuck], tuple[dict[int, str]]]:
        return type(self), (self.where,)


class Misfit(Stuck):
    """A collective's tensors are not as many, or not as large, as its group needs: with real ranks torch refuses it."""

    kind, why = "wrong group", "a collective does not fit its group"


class _Rank:
    def __init__(self, tape: Tape) -> None:
        self.tape, self.at = tape, 0
        self.storages: dict[int, Array] = {}
        self.leaves = {leaf.storage: leaf for leaf in tape.leaves}
        self.extents: dict[int, int] = defaultdict(int)
        self.pending: dict[int, tuple[Window, tuple[int, int, int]]] = {}
        self.asked: dict[int, Node] = {}
        self.reads: dict[int, Array] = {}
        self.sent = {(node, w): block for node, w, block in tape.sent}
        self.imagined = set(tape.imagined)
        for node in tape.nodes:
            for w in (*node.ins, *node.outs):
                if w is not None and (end := w.end) > self.extents[w.storage]:
                    self.extents[w.storage] = end
        for held in tape.held:
            self.extents[held.window.storage] = max(self.extents[held.window.storage], held.window.end)


# More than 25 methods: what all ranks do, node by node, on one table of their storages; `lanes/machine.py` does some of it otherwise.
class Machine:
    """See the module.

    Args:
        tapes: of all ranks, in order.
        domain: in which it computes.
        leaves: elements of storages that a step begins with, as `leaves.py` names them.
        seen: is called with rank, node, results and the first one's number, of every node that computes floats. Numbers below 0 are
            of results in between, from which a meaning computes on.
        named: is called before it with the same, as views that it may put other elements into.
    """

    def __init__(self, tapes: Sequence[Tape], domain: Domain, leaves: Leaves, seen: Seen | None = None, named: Seen | None = None) -> None:
        self.d, self._leaves, self._seen, self._named = domain, leaves, seen, named
        self._ranks = [_Rank(tape) for tape in tapes]
        self.marks: list[dict[str, Array]] = [{} for _ in tapes]
        self.opaque: dict[str, str] = {}
        self.untrue: set[tuple[int, int]] = set()  # (rank, node) that gave other integers, or numbers that were read, where nothing was sent
        self._cx = Context(domain)
        self._waiting: dict[tuple[tuple[int, ...], int], dict[int, Node]] = defaultdict(dict)
        self._turn: list[dict[tuple[int, ...], int]] = [defaultdict(int) for _ in tapes]
        self._mail: dict[tuple[int, int, int], list[list[Array]]] = defaultdict(list)
        self._finished: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Run all ranks to their ends.

        Raises:
            Stuck: no rank can go on.
        """
        while True:
            moved = [self._advance(r) for r in range(len(self._ranks))]
            if all(rank.at >= len(rank.tape.nodes) for rank in self._ranks):
                return
            if not any(moved):
                raise Stuck({r: self._said(r) for r in range(len(self._ranks))})

    def reads(self, r: int) -> dict[int, Array]:
        """Floats that a rank's program read, by node."""
        return self._ranks[r].reads

    def _said(self, r: int) -> str:
        rank = self._ranks[r]
        if rank.at >= len(rank.tape.nodes):
            return "has ended"
        node = rank.tape.nodes[rank.at]
        late = next((rank.asked[w.storage] for w in node.ins if w.storage in rank.pending), None)
        if late is not None:
            return f"waits for what is to come of rank {self.peer(late)} in {late.op} at {late.place or late.module}"
        return f"waits in {node.op} of ranks {list(node.ranks)} at {node.place or node.module}"

    def _advance(self, r: int) -> bool:
        rank, moved = self._ranks[r], False
        while rank.at < len(rank.tape.nodes):
            if not self._do(r, rank, rank.tape.nodes[rank.at]):
                break
            rank.at += 1
            moved = True
        return moved

    def _do(self, r: int, rank: _Rank, node: Node) -> bool:
        """One node; False when it has to wait."""
        name = node.op.split(".")[1] if "." in node.op else node.op
        if name in collectives.RECEIVE and node.op.startswith("c10d"):
            return self._receive(r, rank, node)
        if rank.pending and not all(self._arrived(rank, w.storage) for w in node.ins):
            return False
        if name in collectives.SEND and node.op.startswith("c10d"):
            self._mail[(r, self.peer(node), int(node.args[3] or 0))].append([self.read(r, w).copy() for w in node.ins])
        elif collective(node.op):
            return self._join(r, node)
        elif node.op == MARK:
            if self._named:
                self._named(r, rank.at, [self.read(r, node.ins[0])], 0)
            self.marks[r].setdefault(node.detail, self.read(r, node.ins[0]).copy())
        elif node.op == READ:
            rank.reads[rank.at] = self.read(r, node.ins[0]).reshape(())
            if node.detail == ABSENT and self.d.name == "f64" and not np.isclose(float(rank.reads[rank.at]), node.args[0], rtol=_SAME):
                self.untrue.add((r, rank.at))
        else:
            if rank.at in rank.imagined and self.d.name == "f64":
                self._check_imagined(r, rank, node)
            self._compute(r, rank, node)
        return True

    # -- other ranks

    def peer(self, node: Node) -> int:
        """The rank that a send goes to, or a receive comes from."""
        peer = int(node.args[2])
        return node.ranks[peer] if peer < len(node.ranks) else peer

    def _receive(self, r: int, rank: _Rank, node: Node) -> bool:
        for w in node.ins:
            rank.pending[w.storage] = (w, (self.peer(node), r, int(node.args[3] or 0)))
            rank.asked[w.storage] = node
        return True

    def _arrived(self, rank: _Rank, storage: int) -> bool:
        if storage not in rank.pending:
            return True
        for one in list(rank.pending):  # in the order in which they were asked for
            window, key = rank.pending[one]
            if self._mail[key]:
                self._write(rank, window, self._mail[key].pop(0)[0])
                del rank.pending[one]
        return storage not in rank.pending

    def _join(self, r: int, node: Node) -> bool:
        ranks = node.ranks or tuple(range(len(self._ranks)))
        key = (ranks, self._turn[r][ranks])
        if (r, self._ranks[r].at) in self._finished:
            self._finished.discard((r, self._ranks[r].at))
            self._turn[r][ranks] += 1
            return True
        self._waiting[key][r] = node
        there = self._waiting[key]
        if len(there) < len(ranks) or any(m >= len(self._ranks) for m in ranks):
            return False
        nodes = [there[m] for m in ranks]
        if len({n.op for n in nodes}) > 1:
            raise Stuck({m: f"is in {there[m].op} of ranks {list(ranks)} at {there[m].place or there[m].module}" for m in ranks})
        self._exchange(ranks, nodes)
        for m in ranks:
            if m != r:
                self._finished.add((m, self._ranks[m].at))
        self._turn[r][ranks] += 1
        return True

    def _exchange(self, ranks: tuple[int, ...], nodes: list[Node]) -> None:
        means = collectives.find(nodes[0].op)
        if means is None:
            raise NotImplementedError(f"collective {nodes[0].op}")
        joint = collectives.Joint(self.d, nodes, lambda m, w: self.read(ranks[m], w))
        if odd := collectives.misfit(joint):
            raise Misfit({m: f"{n.op} over ranks {list(ranks)[:8]} {odd}, at {n.place or n.module}" for m, n in zip(ranks, nodes)})
        try:
            found = list(means(joint))
        except (ValueError, IndexError) as error:
            if len({tuple(w.size for w in n.ins) for n in nodes}) > 1:
                raise Stuck({m: f"is in {n.op} with {', '.join(str(list(w.size)) for w in n.ins)} at {n.place or n.module}" for m, n in zip(ranks, nodes)}) from None
            raise NotImplementedError(f"collective {nodes[0].op} at {nodes[0].place or nodes[0].module}: {str(error)[:80]}") from None
        for member, written in enumerate(found):
            for window, value in written:
                self._write(self._ranks[ranks[member]], window, value)
                self._check_sent(ranks[member], window, value)
            floats = [window for window, _ in written if window.kind == "f" and window.numel]
            self._tell(ranks[member], self._ranks[ranks[member]].at, floats)

    def _check_sent(self, r: int, window: Window, value: Array) -> None:
        rank = self._ranks[r]
        block = rank.sent.get((rank.at, window))
        if block is not None and not np.array_equal(rank.tape.blocks[block].astype(np.int64), value.reshape(-1)):
            self.untrue.add((r, rank.at))

    def _check_imagined(self, r: int, rank: _Rank, node: Node) -> None:
        """Whether true floats give the integers that were recorded."""
        from proctor.oracle.prove.by_torch import called, tensor_of

        try:
            found = called(node, [tensor_of(np.asarray(self.read(r, w)), w.kind) for w in node.ins])
        except Exception:  # noqa: BLE001 - it is a kernel of torch or of a library, on numbers of our own
            found = []
        for k, w in enumerate(node.outs):
            if w is not None and w.kind != "f" and node.values[k] >= 0:
                here = found[k] if k < len(found) else None
                if here is None or not np.array_equal(here.reshape(-1), rank.tape.blocks[node.values[k]].astype(here.dtype)):
                    self.untrue.add((r, rank.at))

    # -- one rank

    def _compute(self, r: int, rank: _Rank, node: Node) -> None:
        results: list[Array | None] = [None] * len(node.outs)
        wanted = [k for k, w in enumerate(node.outs) if w is not None and node.values[k] < 0 and w.numel]
        if wanted:
            results = self._meant(r, rank, node, wanted)
        for k, w in enumerate(node.outs):
            if w is None:
                continue
            if node.values[k] >= 0:
                block = rank.tape.blocks[node.values[k]]
                self._write(rank, w, (block.astype(np.int64) if w.kind != "f" else self.literal(block)).reshape(w.size))
            elif w.numel:
                found = results[k]
                if found is not None:
                    self._write(rank, w, found)
        self._tell(r, rank.at, [w for k in wanted if (w := node.outs[k]) is not None and w.kind == "f"])

    def _tell(self, r: int, at: int, windows: list[Window]) -> None:
        if (self._seen or self._named) and windows:
            self._show(r, at, [self.read(r, w) for w in windows], 0)

    def _show(self, r: int, at: int, views: list[Array], first: int) -> None:
        if self._named:
            self._named(r, at, views, first)
        if self._seen:
            self._seen(r, at, views, first)

    def _between(self, r: int, at: int) -> Callable[[Array], None]:
        numbers = itertools.count(1)
        return lambda found: self._show(r, at, [found], -next(numbers))

    def _meant(self, r: int, rank: _Rank, node: Node, wanted: list[int]) -> list[Array | None]:
        base, many = meanings.base_of(node.op)
        if base.removeprefix(COMPLEX).startswith(("empty", "new_empty")):
            return [self._junk(r, rank, node, k) for k in range(len(node.outs))]
        means = meanings.find(node.op)
        if means is not None:
            cx = self._cx
            cx.sizes = [w.size if w is not None else () for w in node.outs]
            cx.inner = self._between(r, rank.at) if self._seen or self._named else None
            cx.recorded = self._recorded(r, rank, node)
            args = [self._argument(r, rank, node, a) for a in node.args]
            named = {k: self._argument(r, rank, node, a) for k, a in node.kwargs.items() if k not in IGNORED and a is not None}
            try:
                if many:
                    results = meanings.over_lists(cx, means, args, named, len(node.outs))
                else:
                    found = means(cx, *args, **named)
                    results = list(found) if isinstance(found, tuple) else [found]
                if len(results) < len(node.outs) or any(results[k] is None for k in wanted):
                    raise NotImplementedError("a result that the meaning does not give")
                return results
            except (NotImplementedError, TypeError, ValueError, IndexError) as error:
                self.opaque.setdefault(f"{node.op} ({str(error)[:80] or 'this form of it'})", node.place or node.module)
        else:
            self.opaque.setdefault(node.op, node.place or node.module)
        return [self._unknown(r, node, k) if k in wanted else None for k in range(len(node.outs))]

    def _recorded(self, r: int, rank: _Rank, node: Node) -> list[Array | None]:
        return [rank.tape.blocks[v] if v >= 0 else None for v in node.values]

    def _argument(self, r: int, rank: _Rank, node: Node, value: Any) -> Any:
        if isinstance(value, dict):
            if "t" in value:
                w = node.ins[value["t"]]
                array = self.read(r, w)
                return Floats(array) if w.kind == "f" else (array.astype(bool) if w.kind == "b" else array)
            if "c" in value:
                return Pairs(self.read(r, node.ins[value["c"]]))
            if "z" in value:
                return Pairs(np.array([self.d.const(meanings.number(v)) for v in value["z"]], self.d.dtype))
            if "r" in value:
                return Floats(rank.reads[value["r"]]) if value["r"] in rank.reads else value["v"]
            return float(value["x"]) if "x" in value else None
        if isinstance(value, list):
            return [self._argument(r, rank, node, v) for v in value]
        return value

    def _unknown(self, r: int, node: Node, k: int) -> Array | None:
        """An uninterpreted function of everything that went in."""
        w = node.outs[k]
        if w is None:
            return None
        text = repr((node.op, k, [a for a in node.args if not isinstance(a, dict)]))
        key = hash((text, *(self.read(r, i).tobytes() for i in node.ins)))
        return self.d.symbol((np.arange(w.numel, dtype=np.int64) * 1_000_003) ^ np.int64(key)).reshape(w.size)

    def _junk(self, r: int, rank: _Rank, node: Node, k: int) -> Array | None:
        """What memory that nothing was written to holds."""
        w = node.outs[k]
        if w is None or w.kind != "f":
            return None
        return self.d.symbol(np.arange(w.numel, dtype=np.int64) + (hash((r, rank.at, k, len(self._ranks))) & (2**61 - 1))).reshape(w.size)

    def literal(self, block: Array) -> Array:
        """Recorded numbers that no parameter went into: constants where they are ones that a program writes down."""
        return literal(self.d, block)

    def read(self, r: int, w: Window) -> Array:
        """What a window of a rank shows, as a view."""
        return _view(self._storage(self._ranks[r], w), w)

    def _storage(self, rank: _Rank, w: Window) -> Array:
        found = rank.storages.get(w.storage)
        if found is None or len(found) < w.end:
            grown = self._born(rank, w)
            if found is not None:
                grown[: len(found)] = found
            rank.storages[w.storage] = found = grown
        return found

    def _born(self, rank: _Rank, w: Window) -> Array:
        size = max(rank.extents[w.storage], w.end)
        made = np.zeros(size, np.int64 if w.kind != "f" else self.d.dtype)
        leaf = rank.leaves.get(w.storage)
        if leaf is not None:
            given = self._leaves.get((rank.tape.rank, w.storage))
            block = rank.tape.blocks[leaf.block]
            if given is None:
                given = block.astype(np.int64) if leaf.kind != "f" else self.literal(block)
            n = min(size, len(given))
            made[:n] = given[:n]
        return made

    def _write(self, rank: _Rank, w: Window, value: Array) -> None:
        storage = self._storage(rank, w)
        _view(storage, w)[...] = value.reshape(w.size) if value.size == w.numel else value


_LOWEST = -1e30
_SAME = 1e-4  # of a number that was read in single precision
IGNORED = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "generator", "non_blocking", "implicit", "sparse_grad"})


def literal(domain: Domain, block: Array) -> Array:
    """See `Machine.literal`."""
    if domain.name == "f64":
        return block.astype(np.float64)
    flat = block.astype(np.float64).reshape(-1)
    if flat.size and (flat == flat[0]).all():  # such as zeros: one number is quicker than a search for different ones
        values, back = flat[:1], np.zeros(flat.size, np.int64)
    else:
        values, back = np.unique(flat, return_inverse=True)
    found = domain.symbol(values.view(np.int64))
    for k in np.flatnonzero(written_down(values) | (values < _LOWEST)).tolist():
        found[k] = domain.const(meanings.number(float(values[k])))
    return found[back.reshape(-1)]


def _view(storage: Array, w: Window) -> Array:
    item = storage.itemsize
    return np.ndarray(w.size, storage.dtype, storage, w.offset * item, _steps(w.stride, item))


@functools.lru_cache(1 << 14)
def _steps(stride: tuple[int, ...], item: int) -> tuple[int, ...]:
    """In bytes."""
    return tuple(s * item for s in stride)
