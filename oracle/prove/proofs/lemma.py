"""Two elements are the same formula: shown by writing out the few operations between them and what both have, once for all like them.

A lemma is about a *cone*: operations from two lists of elements back to where formulas are cut. Everything that is cut off stands for
anything at all, so a lemma that was shown holds wherever the same cone occurs with other elements there: on another layer,
microbatch, stage or rank. That it is the same cone is compared: operations, shapes, and which elements meet which. Where pairs of elements can
be unfolded (`unfold.py`), a lemma is about one pair, and holds for all that are like it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.applied import APPLIED, CONST, Application, Applied
from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.proofs.unfold import patterns, picked
from proctor.oracle.prove.tape import Array

# how many cuts are looked behind, one after the other, in the candidate's formula and in the reference's; where one side is cut in between and the other is not,
# looking behind those of both is more than is needed, and may be too much
_DEPTHS: Final = ((0, 0), (1, 1), (0, 2), (2, 0), (2, 2), (0, 4), (4, 4), (8, 8))
_MOST_OPERATIONS: Final = 160
_MOST_ELEMENTS: Final = 2_000_000
_TOGETHER: Final = 60_000  # of what cannot be unfolded
_TRIES: Final = 12  # elements of one lemma that are not shown to be the same
_TERMS: Final = 1_500_000
_FIRST: Final = 16  # pairs of different patterns; where none of them is shown, others are not tried
_SECONDS: Final = 10.0  # for one depth of a lemma
_VAIN: Final = 3  # attempts at formulas of the same operations, of which none was shown, where a lemma is not needed
_APP: Final = 1 << 62
_NUMBER: Final = 1 << 61


class Lemmas:
    """What was shown, and what could not be.

    Attributes:
        domain: of the formulas.
        shown: how many different lemmas were shown.
        used: how often one was.
    """

    def __init__(self, domain: Applied, until: float) -> None:
        self.domain = self._d = domain
        self._until = until
        self._known: dict[bytes, Array] = {}
        self._vain: Counter[tuple[str, ...]] = Counter()
        self.shown = self.used = self.polynomials = self.atoms = 0

    def same(self, here: Array, there: Array, depths: Sequence[tuple[int, int]] = _DEPTHS) -> bool:
        """Whether two lists of elements are the same formulas, one by one.

        Raises:
            OutOfBudget: the time of the whole proof is over.
        """
        return bool(self.alike(here, there, depths).all())

    def alike(self, here: Array, there: Array, depths: Sequence[tuple[int, int]] = _DEPTHS, *, needed: bool = True) -> Array:
        """Which elements of two lists are shown to be the same formulas: each at the first depth that is enough.

        Args:
            depths: that are tried.
            needed: False where it only spares work later, such as a gradient of the reference that is 0: what failed in a few layers or microbatches is not tried in all of them.

        Raises:
            OutOfBudget: the time of the whole proof is over.
        """
        here, there = here.reshape(-1), there.reshape(-1)
        alike, done = np.asarray(here == there), list[list[int]]()
        for depth in depths:
            rest = np.flatnonzero(~alike)
            if not rest.size:
                break
            if time.process_time() > self._until:
                raise OutOfBudget("more time than the budget allows")
            cone = self._cone(here[rest], there[rest], depth)
            if cone is None or cone in done:
                continue
            done.append(cone)
            kind = tuple(self._d.groups[group].op for group in cone)
            if not needed and self._vain[kind] >= _VAIN:
                continue
            found = self._found(here[rest], there[rest], cone)
            self._vain[kind] = 0 if found.any() else self._vain[kind] + 1
            if found.any():
                self.used += 1
                alike[rest[found]] = True
        return alike

    def _found(self, here: Array, there: Array, cone: list[int]) -> Array:
        """Which pairs are shown at one depth: those that are alike by one of them, others all together."""
        by_pattern = patterns(self._d, here, there, cone)
        if by_pattern is None:
            if sum(a.size for group in cone for a in self._d.groups[group].inputs) > _TOGETHER:
                return np.zeros(here.size, bool)
            key = self._key(here, there, cone)
            if key not in self._known:
                self._known[key] = self._show(here, there, cone)
                self.shown += bool(self._known[key].any())
            return self._known[key]
        new = [(key, spots[0]) for key, spots in by_pattern.items() if key not in self._known]
        for part in (new[:_FIRST], new[_FIRST:]):
            if part:
                firsts = np.array([spot for _, spot in part])
                shown = self._show(here[firsts], there[firsts], cone)
                self._known.update((key, shown[k : k + 1]) for k, (key, _) in enumerate(part))
                self.shown += int(shown.sum())
                if not shown.any():
                    break
        found = np.zeros(here.size, bool)
        for key, spots in by_pattern.items():
            found[spots] = self._known[key][0] if key in self._known else False
        return found

    def _cone(self, here: Array, there: Array, depths: tuple[int, int]) -> list[int] | None:
        """Groups that are written out, in the order in which they are met; None when there are too many."""
        level: dict[int, int] = {}
        order: list[int] = []
        depth = max(depths)
        todo: deque[tuple[Array, int]] = deque([(there, depth - depths[1] - 1), (here, depth - depths[0])])
        elements = 0
        while todo:
            ids, at = todo.popleft()
            for group in self._groups_in(ids):
                if self._d.kinds[group] != APPLIED:
                    continue
                inner = at + self._d.named[group]
                if inner > depth or level.get(group, 1 << 30) <= inner:
                    continue
                if group not in level:
                    order.append(group)
                    elements += sum(a.size for a in self._d.groups[group].inputs)
                    if len(order) > _MOST_OPERATIONS or elements > _MOST_ELEMENTS:
                        return None
                level[group] = inner
                for a in self._d.groups[group].inputs:
                    (todo.append if self._d.named[group] else todo.appendleft)((a, inner))
        return order

    def _groups_in(self, ids: Array) -> list[int]:
        groups, first = np.unique(self._d.groups_of(ids.reshape(-1)), return_index=True)
        found: list[int] = groups[np.argsort(first)].tolist()
        return found

    def _key(self, here: Array, there: Array, cone: list[int]) -> bytes:
        """A name of the lemma that is the same for all cones like it."""
        applications: list[Application] = [self._d.groups[g] for g in cone]
        arrays = [here.reshape(-1), there.reshape(-1), *(a.reshape(-1) for one in applications for a in one.inputs)]
        ids = np.concatenate(arrays)
        groups = self._d.groups_of(ids)
        distinct, back = np.unique(groups, return_inverse=True)
        place = {g: k for k, g in enumerate(cone)}
        shift = np.array([(_APP + (place[g] << 32) - self._d.base(g)) if g in place else (_NUMBER if self._d.kinds[g] == CONST else 0) for g in distinct.tolist()], np.int64)[back]
        codes = ids + shift
        free = shift == 0
        leaves, first, inverse = np.unique(ids[free], return_index=True, return_inverse=True)
        rank = np.empty(len(leaves), np.int64)
        rank[np.argsort(first)] = np.arange(len(leaves))
        codes[free] = rank[inverse]
        text = repr([(one.op, one.params, one.shape, [a.shape for a in one.inputs]) for one in applications] + [here.size])
        return hashlib.blake2b(text.encode() + codes.tobytes(), digest_size=20).digest()

    def _show(self, here: Array, there: Array, cone: list[int]) -> Array:
        poly = Poly(_TERMS, min(self._until, time.process_time() + _SECONDS))
        needed, symbols = self._needed(np.concatenate([here, there]), cone)
        values: dict[int, tuple[Array, Array]] = {}
        shown, tries = np.zeros(here.size, bool), _TRIES

        def read(ids: Array) -> Array:
            distinct, back = np.unique(ids, return_inverse=True)
            groups = self._d.groups_of(distinct).tolist()
            found = np.empty(len(distinct), np.int64)
            for k, (x, group) in enumerate(zip(distinct.tolist(), groups)):
                if group in values:
                    offsets, made = values[group]
                    found[k] = made[np.searchsorted(offsets, x - self._d.base(group))]
                elif self._d.kinds[group] == CONST:
                    found[k] = poly.const(self._d.groups[group])
                else:
                    found[k] = symbols[x]
            return found[back].reshape(ids.shape)

        try:
            symbols.update(zip(symbols, poly.symbol(np.arange(len(symbols), dtype=np.int64)).tolist()))
            for group in sorted(needed):  # what goes in was made before
                one, (offsets, inputs) = self._d.groups[group], needed[group]
                result = np.asarray(_OPERATIONS[one.op](poly, [read(a) for a in inputs], one.params)).reshape(-1)
                values[group] = offsets, (poly.each(poly.name_of, result) if self._d.named[group] else result)
            pairs = zip(read(here).tolist(), read(there).tolist())
            for k, (x, y) in enumerate(pairs):
                shown[k] = poly.same(x, y)
                tries -= not shown[k]
                if not tries:
                    break
        except (OutOfBudget, NotImplementedError):
            pass  # what was shown until then is
        self.polynomials += len(poly.polys)
        self.atoms += len(poly.atoms)
        return shown

    def _needed(self, ids: Array, cone: list[int]) -> tuple[dict[int, tuple[Array, list[Array]]], dict[int, int]]:
        """Of each group that is written out the elements that are needed and what goes into them; and what is cut off."""
        wanted: dict[int, list[Array]] = {group: [] for group in cone}
        needed: dict[int, tuple[Array, list[Array]]] = {}
        cut: dict[int, int] = {}

        def want(ids: Array) -> None:
            distinct = np.unique(ids)
            groups = self._d.groups_of(distinct)
            for group in np.unique(groups).tolist():
                if group in wanted:
                    wanted[group].append(distinct[groups == group] - self._d.base(group))
                elif self._d.kinds[group] != CONST:
                    cut.update(dict.fromkeys(distinct[groups == group].tolist(), 0))

        want(ids)
        for group in sorted(cone, reverse=True):
            if wanted[group]:
                offsets = np.unique(np.concatenate(wanted[group]))
                needed[group] = offsets, picked(self._d.groups[group], offsets)
                for a in needed[group][1]:
                    want(a)
        return needed, cut


# inputs as `picked` gives them
_OPERATIONS: Final[dict[str, Any]] = {
    "add": lambda d, a, _: d.add(*a),
    "sub": lambda d, a, _: d.sub(*a),
    "mul": lambda d, a, _: d.mul(*a),
    "square": lambda d, a, _: d.square(*a),
    "inv": lambda d, a, _: d.inv(*a),
    "sum": lambda d, a, _: d.sum(a[0], (1,)),
    "matmul": lambda d, a, _: d.matmul(a[0][:, None, :], a[1][:, :, None]),
    "apply": lambda d, a, p: d.apply(p[0], *a),
    "largest": lambda d, a, _: d.largest(a[0], 1),
}
