"""What collectives mean: of all ranks of a group at once.

Each takes the nodes of the group's ranks in its order and gives for each rank what is written where. `gather` reads a
window of a rank, results are pairs of window and array. In place as `torch.distributed` does it, or functional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.tape import Array, Node, Window

Read = Callable[[int, Window], Array]
Written = list[tuple[Window, Array]]
Meaning = Callable[["Joint"], list[Written]]
_MEANINGS: Final[dict[str, Meaning]] = {}
SEND: Final = frozenset({"send"})
RECEIVE: Final = frozenset({"recv_", "recv_any_source_"})


class Joint:
    """A collective of a group.

    Attributes:
        nodes: of each of its ranks, in the group's order.
        size: how many ranks.
    """

    def __init__(self, domain: Domain, nodes: Sequence[Node], read: Read) -> None:
        self.d, self.nodes, self.size = domain, nodes, len(nodes)
        self._read = read

    def windows(self, member: int, argument: int) -> list[Window]:
        """The tensors of an argument of a rank's call, nested lists flattened."""
        return list(_flat(self.nodes[member], self.nodes[member].args[argument]))

    def value(self, member: int, window: Window) -> Array:
        """What a rank holds there."""
        return self._read(member, window)

    def reduction(self) -> str:
        """Of the in-place forms as the options said; of the functional ones an argument."""
        for value in self.nodes[0].args:
            if isinstance(value, str) and value.lower() in ("sum", "avg", "max", "min", "product"):
                return value.lower()
        return self.nodes[0].detail or "sum"

    def reduce(self, parts: Sequence[Array], kind: str) -> Array:
        """Parts of all ranks in one."""
        how, d = self.reduction(), self.d
        if kind != "f":
            whole = np.stack(parts)
            reduced: dict[str, Callable[[int], Any]] = {"sum": whole.sum, "max": whole.max, "min": whole.min, "product": whole.prod, "avg": whole.sum}
            return np.asarray(reduced[how](0))
        if how in ("sum", "avg"):
            total = d.sum(np.stack(parts), (0,))
            return d.mul(total, np.asarray(d.const(Fraction(1, self.size)))) if how == "avg" else total
        if how == "max":
            return d.largest(np.stack(parts), 0)
        if how == "min":
            minus = np.asarray(d.const(Fraction(-1)))
            return d.mul(d.largest(d.mul(np.stack(parts), minus), 0), minus)
        if how == "product":
            found = parts[0]
            for part in parts[1:]:
                found = d.mul(found, part)
            return found
        raise NotImplementedError(f"reduction {how}")


def _flat(node: Node, value: Any) -> Any:
    if isinstance(value, dict) and ("t" in value or "c" in value):
        yield node.ins[value["t"] if "t" in value else value["c"]]
    elif isinstance(value, list):
        for v in value:
            yield from _flat(node, v)


def means(*names: str) -> Callable[[Meaning], Meaning]:
    """Register a collective by its names without namespace and overload."""

    def register(function: Meaning) -> Meaning:
        for name in names:
            _MEANINGS[name] = function
        return function

    return register


def find(op: str) -> Meaning | None:
    """What a collective means."""
    return _MEANINGS.get(op.split(".")[1])


def misfit(j: Joint) -> str:
    """What does not fit the group's size; "" where all does. A fake process group takes lists of any length, and real ones do not."""
    name = j.nodes[0].op.split(".")[1]
    for m, node in enumerate(j.nodes):
        if name in _LISTS:
            for argument in _LISTS[name]:
                if (have := len(j.windows(m, argument))) != j.size:
                    return f"has a list of {have} tensors for a group of {j.size}"
        elif name in _WHOLE:
            taken, given = (j.windows(m, 1), j.windows(m, 0)) if name.startswith("_") else (j.windows(m, 0), [w for w in node.outs if w is not None])
            for small, large in zip(*((taken, given) if _WHOLE[name] == "given" else (given, taken))):
                if small.numel * j.size != large.numel:
                    return f"has {large.numel} elements for a group of {j.size} with {small.numel} each"
    return ""


_LISTS: Final = {"allgather_": (0,), "reduce_scatter_": (1,), "alltoall_": (0, 1)}
_WHOLE: Final = {"all_gather_into_tensor": "given", "_allgather_base_": "given", "reduce_scatter_tensor": "taken", "_reduce_scatter_base_": "taken"}  # which of the two is the group's


def _in_place(j: Joint, argument: int = 0) -> list[list[Window]]:
    return [j.windows(m, argument) for m in range(j.size)]


@means("allreduce_", "allreduce_coalesced_")
def _allreduce(j: Joint) -> list[Written]:
    windows = _in_place(j)
    totals = [j.reduce([j.value(m, windows[m][k]) for m in range(j.size)], w.kind) for k, w in enumerate(windows[0])]
    return [list(zip(windows[m], totals)) for m in range(j.size)]


@means("all_reduce", "all_reduce_", "all_reduce_coalesced")
def _all_reduce(j: Joint) -> list[Written]:
    windows = _in_place(j)
    totals = [j.reduce([j.value(m, windows[m][k]) for m in range(j.size)], w.kind) for k, w in enumerate(windows[0])]
    return [_results(j.nodes[m], totals) for m in range(j.size)]


def _results(node: Node, values: Sequence[Array]) -> Written:
    return [(w, v.reshape(w.size)) for w, v in zip((w for w in node.outs if w is not None), values)]


@means("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced")
def _all_gather(j: Joint) -> list[Written]:
    windows = _in_place(j)
    whole = [np.concatenate([j.value(m, windows[m][k]) for m in range(j.size)]) if w.size else np.stack([j.value(m, windows[m][k]) for m in range(j.size)]) for k, w in enumerate(windows[0])]
    return [_results(j.nodes[m], whole) for m in range(j.size)]


@means("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
def _reduce_scatter(j: Joint) -> list[Written]:
    windows = _in_place(j)
    totals = [j.reduce([j.value(m, windows[m][k]) for m in range(j.size)], w.kind) for k, w in enumerate(windows[0])]
    return [_results(j.nodes[m], [np.split(t, j.size)[m] for t in totals]) for m in range(j.size)]


@means("all_to_all_single")
def _all_to_all_functional(j: Joint) -> list[Written]:
    return [[(w, v.reshape(w.size)) for w, v in [(_first(j.nodes[m]), _exchanged(j, m, 0, 2))]] for m in range(j.size)]


def _first(node: Node) -> Window:
    found = next(w for w in node.outs if w is not None)
    return found


def _exchanged(j: Joint, member: int, source: int, splits: int) -> Array:
    """What a rank receives: of every rank the part that is for it."""
    parts = []
    for m in range(j.size):
        value = j.value(m, j.windows(m, source)[0])
        sizes = j.nodes[m].args[splits]
        ends = np.cumsum(sizes)[:-1] if sizes else j.size
        parts.append(np.split(value, ends)[member])
    return np.concatenate(parts)


@means("alltoall_base_")
def _all_to_all(j: Joint) -> list[Written]:
    return [[(w, _exchanged(j, m, 1, 4).reshape(w.size))] for m in range(j.size) for w in j.windows(m, 0)]


@means("alltoall_")
def _all_to_all_lists(j: Joint) -> list[Written]:
    return [
        [(w, j.value(k, j.windows(k, 1)[m]).reshape(w.size)) for k, w in enumerate(j.windows(m, 0))] for m in range(j.size)
    ]


@means("_allgather_base_", "allgather_into_tensor_coalesced_")
def _allgather_base(j: Joint) -> list[Written]:
    found: list[Written] = []
    for m in range(j.size):
        outs = j.windows(m, 0)
        found.append([(w, np.concatenate([j.value(k, j.windows(k, 1)[i]).reshape(-1) for k in range(j.size)]).reshape(w.size)) for i, w in enumerate(outs)])
    return found


@means("allgather_", "allgather_coalesced_")
def _allgather(j: Joint) -> list[Written]:
    return [[(w, j.value(k, j.windows(k, 1)[0]).reshape(w.size)) for k, w in enumerate(j.windows(m, 0))] for m in range(j.size)]


@means("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
def _reduce_scatter_base(j: Joint) -> list[Written]:
    found: list[Written] = [[] for _ in range(j.size)]
    for i, w in enumerate(j.windows(0, 0)):
        total = j.reduce([j.value(m, j.windows(m, 1)[i]).reshape(-1) for m in range(j.size)], w.kind)
        for m, part in enumerate(np.split(total, j.size)):
            out = j.windows(m, 0)[i]
            found[m].append((out, part.reshape(out.size)))
    return found


@means("reduce_scatter_")
def _reduce_scatter_lists(j: Joint) -> list[Written]:
    found: list[Written] = []
    for m in range(j.size):
        out = j.windows(m, 0)[0]
        found.append([(out, j.reduce([j.value(k, j.windows(k, 1)[m]) for k in range(j.size)], out.kind).reshape(out.size))])
    return found


def _root(j: Joint, argument: int) -> int:
    return int(j.nodes[0].args[argument])


@means("broadcast_")
def _broadcast(j: Joint) -> list[Written]:
    windows, root = _in_place(j), _root(j, 2)
    return [[(w, j.value(root, windows[root][k]).reshape(w.size)) for k, w in enumerate(windows[m])] for m in range(j.size)]


@means("broadcast")
def _broadcast_functional(j: Joint) -> list[Written]:
    root = j.nodes[0].ranks.index(_root(j, 1)) if _root(j, 1) in j.nodes[0].ranks else _root(j, 1)
    return [_results(j.nodes[m], [j.value(root, j.windows(root, 0)[0])]) for m in range(j.size)]


@means("reduce_")
def _reduce(j: Joint) -> list[Written]:
    windows, root = _in_place(j), _root(j, 3)
    totals = [j.reduce([j.value(m, windows[m][k]) for m in range(j.size)], w.kind) for k, w in enumerate(windows[0])]
    return [list(zip(windows[m], totals)) if m == root else [] for m in range(j.size)]


@means("gather_")
def _gather(j: Joint) -> list[Written]:
    root = _root(j, 3)
    return [
        [(w, j.value(k, j.windows(k, 1)[0]).reshape(w.size)) for k, w in enumerate(j.windows(m, 0))] if m == root else []
        for m in range(j.size)
    ]


@means("scatter_")
def _scatter(j: Joint) -> list[Written]:
    root = _root(j, 3)
    return [[(w, j.value(root, j.windows(root, 1)[m]).reshape(w.size)) for w in j.windows(m, 0)] for m in range(j.size)]


@means("barrier", "monitored_barrier_")
def _barrier(j: Joint) -> list[Written]:
    return [[] for _ in range(j.size)]
