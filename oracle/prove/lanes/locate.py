"""Where a program on a large mesh parts from its reference: the first operation whose result the reference never computes.

The machine runs operations in an order in which what goes in was computed before. A result is *known* if the reference has all its elements,
perhaps times a number of ranks or microbatches, *partial* if it has their sums along axes of lanes; else it is *other*, and the first such one
is the culprit. One field is enough here: 31 bits an element say where to look, and nothing is judged by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from proctor.oracle.prove.domains.field import P
from proctor.oracle.prove.lanes.domain import values
from proctor.oracle.prove.lanes.family import World
from proctor.oracle.prove.tape import Array, Node, Tape, collective, live
from proctor.oracle.prove.verdict import Culprit

_LOOK = 64  # elements that are looked up before the whole tensor is
# gradients of parameters are sums over rows: of one rank's and one microbatch's, which the reference does not have
_SUMS = ("aten.mm", "aten.bmm", "aten.sum", "aten.add", "aten._foreach_add", "aten.embedding_dense_backward", "aten.index_put")


class Known:
    """All elements that the reference computes."""

    def __init__(self) -> None:
        self._parts: list[Array] = [np.array([0, 1, P - 1])]
        self.keys = np.zeros(0, np.int64)

    def seen(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every result of the reference."""
        self._parts += [np.unique(v) for v in views]

    def done(self, leaves: Sequence[Array]) -> None:
        """All of it was seen."""
        self.keys = np.unique(np.concatenate([*self._parts, *(np.unique(v) for v in leaves)]))
        self._parts = []

    def has(self, a: Array) -> bool:
        """Whether the reference has all elements."""
        flat = a.reshape(-1)
        for cut in (flat[:_LOOK], flat[_LOOK:]):
            if cut.size and not (self.keys[np.minimum(np.searchsorted(self.keys, cut), len(self.keys) - 1)] == cut).all():
                return False
        return True


class Watch:
    """Looks at each result of the candidate.

    Args:
        numbers: by which results may differ from the reference's, such as how many microbatches there are.
    """

    def __init__(self, known: Known, world: World, numbers: Sequence[int]) -> None:
        self._known, self._world = known, world
        self._factors = {f"{n}": n for n in numbers} | {f"1/{n}": pow(n, -1, P) for n in numbers} | {"-1": P - 1}
        self._axes = [k for n in range(1, len(world.lanes) + 1) for k in itertools.combinations(range(len(world.lanes)), n)]
        self._live = [live(family.tape) for family in world.families]
        self._status: dict[tuple[int, int], str] = {}  # of storages
        self.first: tuple[int, int, str] | None = None

    def seen(self, which: int, at: int, views: list[Array], first: int) -> None:
        """Called for every result of a family."""
        node = self._world.families[which].tape.nodes[at]
        if self.first is not None or first < 0 or at not in self._live[which] or not any(w.kind == "f" and w.numel for w in node.ins):
            return
        if all(v.size == 1 for v in views):
            return  # such as a microbatch's loss, which the reference has for all rows together
        found = [self.status(v) for v in views]
        before = [self._status.get((which, w.storage), "") for w in node.ins if w.kind == "f"]
        partial = next((b for b in before if b.startswith("a partial")), "")
        if "other" in found and not collective(node.op) and not partial and ("sum" in before or (node.phase == "backward" and node.op.startswith(_SUMS))):
            found = ["sum" if status == "other" else status for status in found]
        for w, status in zip((w for w in node.outs if w is not None and w.kind == "f"), found):
            self._status[which, w.storage] = status
        if "other" in found and "other" not in before:
            self.first = which, at, partial

    def status(self, view: Array) -> str:
        """Of a result: "", what it is but for a factor, "a partial sum along …" or "other"."""
        a = values(view, len(self._world.lanes))
        for text, f in {"": 1, **self._factors}.items():
            if self._known.has(a if f == 1 else a * pow(f, -1, P) % P):
                return text and f"{text} times the reference's"
        sizes = a.shape[a.ndim - len(self._world.lanes) :]
        for axes in self._axes:
            if any(sizes[k] == 1 for k in axes):
                continue
            total = np.where(a < 0, 0, a).sum(tuple(a.ndim - len(sizes) + k for k in axes)) % P
            if any(self._known.has(total if f == 1 else total * pow(f, -1, P) % P) for f in (1, *self._factors.values())):
                return f"a partial sum along {', '.join(self._world.mesh.axes[self._world.lanes[k]] for k in axes)}"
        return "other"

    def culprit(self, wrong: Sequence[tuple[str, str, int]], marks: Sequence[dict[str, Array]]) -> Culprit:
        """What to look at, first of all wrong outputs."""
        found = self.first
        told = [(name, self.status(marks[which][f"{what} {name}"])) for what, name, which in wrong if what == "grad"]
        plain = next(((name, text) for name, text in told if text not in ("", "other")), None)
        updating = found is not None and self._world.families[found[0]].tape.nodes[found[1]].phase == "update"
        if (found is None or updating) and plain is not None:
            name, text = plain
            kind = "missing collective" if text.startswith("a partial") else "wrong scale"
            return Culprit(kind, name.rpartition(".")[0], said=f"the gradient of {name} is {text}{': it is not reduced' if kind == 'missing collective' else ''}", parameter=name)
        if found is None:
            what, name, _ = wrong[0]
            said = f"{'the gradient of ' * (what == 'grad')}{name}: what goes into it is the reference's; an addend (of a microbatch, of a rank) is missing, doubled, or another one's"
            return Culprit("", name.rpartition(".")[0], said=said, parameter=name)
        which, at, partial = found
        tape: Tape = self._world.families[which].tape
        node: Node = tape.nodes[at]
        named = f"{node.op} in {node.module or 'no module'} ({node.phase}) at {node.place or 'no line'}"
        said = f"a collective is missing: {named} takes {partial} for the whole" if partial and not collective(node.op) else f"{named} on rank {tape.rank} is the first result that the reference does not compute"
        kind = "missing collective" if partial and not collective(node.op) else ""
        return Culprit(kind, node.module, node.op, node.place, node.phase, (tape.rank,), said)


__all__ = ["Known", "Watch"]
