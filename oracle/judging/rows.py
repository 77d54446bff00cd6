"""Activations whose rows change places: experts that get their tokens from several ranks, in another order than in the reference.

Under expert parallelism the tensors of an expert have no fixed layout: a rank's rows are those that routing sends there, of all
data-parallel ranks, so one call holds rows of several microbatches of the reference. What a module takes in tells which row is
which: each row of its input is one of the reference's, but for rounding. All tensors of the module, results and gradients, are
put in order by that, so their own values have no say in where they lie.

Nothing is compared where that is in any doubt: where the rows are not as many as the reference's (tokens dropped, padded or
replicated), where one has no counterpart, or where most have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.assemble import ACTIVATIONS, Assembler, Merged, Piece
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Name = tuple[int, str, str, str]  # step, kind, name, slot
Call = tuple[int, int]  # rank, call; of the candidate

NEAR: Final = 0.1  # of a row's norm: a counterpart is nearer
CLEAR: Final = 10.0  # times as far away the second nearest must be
ROUNDING: Final = 1e-7  # of a row's norm, at least, is how far away a counterpart counts as being
ENOUGH: Final = 0.5  # of the rows must have one counterpart
FEWEST: Final = 4  # numbers in a row that tell
MOST: Final = 20_000  # rows whose distances are computed
CHUNK: Final = 1024


class Order(NamedTuple):
    """Which rows of a module's tensors are which in the reference.

    Args:
        mine: rows of each call of the candidate, in the order in which `source` counts them.
        theirs: rows of each call of the reference, likewise.
        source: for each row of the reference the candidate's, -1 where that is not sure.
    """

    mine: dict[Call, int]
    theirs: dict[int, int]
    source: npt.NDArray[np.int64]


class Found(NamedTuple):
    """A tensor of the reference with the candidate's values, as far as rows are sure."""

    full: Array
    held: list[tuple[int, Entry]]
    rows: int


class Rows:
    """Puts rows of the candidate in the reference's order.

    Args:
        reference: with noise samples.
        ranks: of the candidate.
        naming: the canonical name of a rank's tensor.
    """

    def __init__(self, reference: Reference, ranks: Mapping[int, RankRecord], naming: Callable[[int, Entry], str]) -> None:
        self._reference, self._ranks = reference, ranks
        self._mine: dict[Name, dict[Call, Entry]] = {}
        self._theirs: dict[Name, dict[int, Entry]] = {}
        for rank, record in ranks.items():
            for entry in record.entries:
                if entry.kind in ("input", "output", "grad_input", "grad_output") and not entry.recompute:
                    self._mine.setdefault((entry.step, entry.kind, naming(rank, entry), entry.slot), {})[rank, entry.call] = entry
        for (step, call, kind, name, slot), entry in reference.entries.items():
            self._theirs.setdefault((step, kind, name, slot), {})[call] = entry
        self._orders: dict[tuple[int, str], Order | None] = {}

    def find(self, key: Key) -> Found | None:
        """The candidate's values of a tensor, or `None` where it is not known which rows they are."""
        step, call, kind, name, slot = key
        place = (step, kind, name, slot)
        mine, theirs = self._mine.get(place), self._theirs[place]
        target = theirs[call]
        if mine is None or not target.shape or not is_floating(target.dtype) or not self._seen_by_noise(key, target):
            return None
        if (step, name) not in self._orders:
            self._orders[step, name] = self._order(step, name)
        order = self._orders[step, name]
        if order is None or not _alike(mine.values(), theirs.values()):
            return None
        if {c: e.shape[0] for c, e in mine.items()} != order.mine or {c: e.shape[0] for c, e in theirs.items()} != order.theirs:
            return None
        start = sum(n for c, n in order.theirs.items() if c < call)
        source = order.source[start : start + target.shape[0]]
        pool = np.concatenate([self._ranks[rank].array(mine[rank, at]) for rank, at in order.mine])
        full = np.array(self._reference.array(target))
        full[source >= 0] = pool[source[source >= 0]]
        bounds = np.cumsum([0, *order.mine.values()])
        held = [(c[0], mine[c]) for i, c in enumerate(order.mine) if bool(((source >= bounds[i]) & (source < bounds[i + 1])).any())]
        return Found(full, held, int((source >= 0).sum())) if held else None

    def placed(self, step: int, module: str) -> bool:
        """Whether the rows of a module were found."""
        return self._orders.get((step, module)) is not None

    def _seen_by_noise(self, key: Key, target: Entry) -> bool:
        """Whether noise left most samples as many rows: otherwise routing changes by rounding alone."""
        shapes = self._reference.sampled_shapes(key)
        return 2 * sum(s == target.shape for s in shapes) > len(shapes)

    def _order(self, step: int, name: str) -> Order | None:
        """The order of a module's rows, by all of its inputs that have them."""
        slots = [
            place
            for place, mine in self._mine.items()
            if place[:3] == (step, "input", name) and place in self._theirs and _alike(mine.values(), self._theirs[place].values())
        ]
        first = max(slots, key=lambda p: np.prod(next(iter(self._mine[p].values())).shape[1:]), default=None)
        if first is None or len(next(iter(self._mine[first].values())).shape) != 2:
            return None
        counts = {c: e.shape[0] for c, e in sorted(self._mine[first].items())}
        expected = {c: e.shape[0] for c, e in sorted(self._theirs[first].items())}
        if sum(counts.values()) != sum(expected.values()) or not 0 < sum(counts.values()) <= MOST:
            return None
        mine, theirs = [], []
        for place in slots:
            here, there = self._mine[place], self._theirs[place]
            if {c: e.shape[0] for c, e in here.items()} == counts and {c: e.shape[0] for c, e in there.items()} == expected:
                a = np.concatenate([_wide(self._ranks[c[0]].array(here[c]), here[c]) for c in counts])
                b = np.concatenate([_wide(self._reference.array(there[c]), there[c]) for c in expected])
                size = float(np.sqrt(np.square(b).mean())) * np.sqrt(b.shape[1]) or 1.0
                mine.append(a / size)
                theirs.append(b / size)
        rows, others = np.concatenate(mine, 1), np.concatenate(theirs, 1)
        source = counterparts(others, rows) if rows.shape[1] >= FEWEST else None
        return Order(counts, expected, source) if source is not None else None



class Scattered:
    """The candidate's tensors whose rows went elsewhere, put together from where they are.

    Args:
        rows: of the candidate.
        assembler: which could not place them.
    """

    def __init__(self, rows: Rows, assembler: Assembler) -> None:
        self._rows, self._assembler = rows, assembler
        self._apart: dict[tuple[int, str], bool] = {}  # by step and module

    def merge(self, key: Key) -> Merged | None:
        """A tensor; `None` where its rows did not go elsewhere, or nobody knows where."""
        if key[2] not in ACTIVATIONS or not self._went(key[0], key[3]):
            return None
        found = self._rows.find(key)
        if found is None:
            return None
        total = len(found.full)
        label = "rows by content" if found.rows == total else f"{found.rows} of {total} rows by content"
        return Merged(found.full, [], [Piece(rank, entry, None, label, firm=True) for rank, entry in found.held])

    def _went(self, step: int, module: str) -> bool:
        """Whether rows that a module takes in could not be put together in some call, though ranks have some."""
        if (step, module) not in self._apart:
            reference = self._assembler.reference
            keys = [(step, c, "input", module, s) for c in range(reference.calls.get(module, 0)) for s in reference.slots.get((step, c, "input", module), ())]
            rows = [k for k in keys if len(reference.entries[k].shape) == 2 and is_floating(reference.entries[k].dtype)]
            self._apart[step, module] = any(m is not None and m.full is None for m in map(self._assembler.merge, rows))
        return self._apart[step, module]


def counterparts(theirs: Array, mine: Array) -> npt.NDArray[np.int64] | None:
    """For each row of `theirs` the row of `mine` that is its own, -1 where it may be several; `None` where one has none.

    Args:
        theirs: shape (rows, numbers), float64.
        mine: of the same shape, in another order and with rounding errors.
    """
    if not np.isfinite(mine).all() or not np.isfinite(theirs).all():
        return None
    out = np.full(len(theirs), -1, np.int64)
    squares = np.square(mine).sum(1)
    for at in range(0, len(theirs), CHUNK):
        rows = theirs[at : at + CHUNK]
        size = np.sqrt(np.square(rows).sum(1))
        far = np.sqrt(np.maximum(np.square(size)[:, None] + squares - 2 * rows @ mine.T, 0.0))
        nearest = far.argmin(1)
        best = far[np.arange(len(rows)), nearest]
        if bool((best > NEAR * size).any()):
            return None
        far[np.arange(len(rows)), nearest] = np.inf
        sure = far.min(1) > CLEAR * np.maximum(best, ROUNDING * size)
        out[at : at + CHUNK] = np.where(sure, nearest, -1)
    told = out[out >= 0]
    if len(told) < ENOUGH * len(out) or len(np.unique(told)) < len(told):
        return None
    return out


def _alike(mine: Any, theirs: Any) -> bool:
    """Whether tensors are rows of one kind: real numbers of one type, as many in a row."""
    return len({(e.dtype, e.shape[1:]) for e in (*mine, *theirs)}) == 1 and all(
        e.shape and is_floating(e.dtype) and e.placement is None for e in (*mine, *theirs)
    )


def _wide(values: Array, entry: Entry) -> Array:
    """Values in float64, a row each."""
    return np.asarray(as_float(values, entry.dtype).astype(np.float64).reshape(entry.shape[0], -1))
