"""A proof by lemmas: each result of the candidate whose value is one of the reference's is shown to be the same formula, and takes its place.

Where to look is said by fields and doubles (`sweep.py`); nothing of that is believed. What is shown is local: from a result back to what was
shown before. So the cost of a proof is that of its different lemmas; layers, microbatches, stages and replicas bring the same ones again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.applied import APPLIED, Applied
from proctor.oracle.prove.domains.poly import ONE, ZERO
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.proofs.lemma import Lemmas
from proctor.oracle.prove.proofs.sweep import Place, Rows, Side, kind_of
from proctor.oracle.prove.tape import MARK, Array, Node, Tape, live

Merges = dict[str, list[list[int]]]
_TRIES: Final = 12
_FEW: Final = 16  # of many elements that doubles alone say to be the same, those that are looked at before the others
_NEAR: Final = ((0, 0), (1, 1), (2, 2))  # depths at which the reference's own elements are compared
_KEYS: Final = {ZERO: 0, ONE: (1 << 31) ^ 1}  # as `joined` makes them
_CONSTANT: Final = -1  # in the place of the reference's node


class Chase:
    """Finds what each result is, and replaces it.

    Attributes:
        merges: as `Sweep.lemmas`, so that it can be done again without looking for it.
        parts: the first operation of the candidate, as (rank, node), whose values are the reference's and whose formulas are not.
    """

    def __init__(self, domain: Applied, lemmas: Lemmas, sides: tuple[Side, Side], factors: Sequence[Fraction], tapes: tuple[Tape, Sequence[Tape]], alignment: Alignment) -> None:
        self._d, self._lemmas, self._factors, self._alignment = domain, lemmas, factors, alignment
        self._there, self._here = there, here = sides
        self._tape, self._tapes = tapes
        self._live = [live(tape) for tape in self._tapes]
        self._going = {rank: max((k for k, one in enumerate(tape.nodes) if one.op == MARK), default=-1) for rank, tape in enumerate(self._tapes)}
        self._zeros = Zeros(domain, there)
        self._rows = Rows(there, here)
        self._first: dict[int, tuple[int, Place, int]] = {}
        self._marked: dict[str, tuple[int, Array]] = {}
        self._known = Known(domain)
        self.merges: Merges = {}
        self.parts: tuple[int, int] | None = None

    def reference(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the reference, which runs first."""
        for k, view in enumerate(views, first):
            self._known.put(view)
            self._constant("reference", self._there, (rank, node, k), view)
            self._again((rank, node, k), view)
            name_groups(self._d, view)
            self._zeros.made((rank, node, k), self._tape, view)
            self._rows.made(rank, node, k, view, kind_of(self._tape.nodes[node], k))
        if self._tape.nodes[node].op == MARK:
            self._marked.setdefault(self._tape.nodes[node].detail, (node, views[0].reshape(-1).copy()))

    def _again(self, place: Place, view: Array) -> None:
        """What the reference computed before, by another operation: one formula, one element."""
        keys = self._there.keys(place, view.shape)
        if keys is None:
            return
        flat, found = view.reshape(-1).copy(), []
        earlier = [self._first.setdefault(key, (x, place, at)) for at, (key, x) in enumerate(zip(keys.reshape(-1).tolist(), flat.tolist()))]
        target = np.array([x for x, _, _ in earlier], np.int64)
        other = np.flatnonzero((flat != target) & (flat > ONE) & (target > ONE) & ~self._d.is_named(flat))
        for part in _by_group(self._d, target[other]):
            chosen = other[part]
            chosen = chosen[self._lemmas.alike(flat[chosen], target[chosen], _NEAR, needed=False)]
            if chosen.size:
                self._known.learn(flat[chosen], target[chosen])
                flat[chosen] = target[chosen]
                found += [[at, earlier[at][1][1], earlier[at][1][2], earlier[at][2], 1, 1] for at in chosen.tolist()]
        if found:
            view[...] = flat.reshape(view.shape)
            self.merges.setdefault(_key("reference", place), []).extend(found)

    def candidate(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        if node not in self._live[rank] or not self._going:  # behind the last output of all ranks nothing is left to show
            return
        for k, view in enumerate(views, first):
            place = rank, node, k
            self._known.put(view)
            self._constant("candidate", self._here, place, view)
            if self._left(place, view) and self.parts is None and first == 0:
                self.parts = rank, node
        if self._tapes[rank].nodes[node].op == MARK:
            self._output((rank, node, 0), views[0])
            if node == self._going.get(rank):
                del self._going[rank]

    def _output(self, place: Place, view: Array) -> None:
        """A gradient is to be the reference's of the same parameter, whatever its values are: where it is 0, they are rounding."""
        what, _, own = self._tapes[place[0]].nodes[place[1]].detail.partition(" ")
        own_name, index = self._alignment.of.get((place[0], own)), self._alignment.index.get((place[0], own))
        found = self._marked.get(f"{what} {own_name}")
        if found is None or index is None or index.size != view.size:
            return
        node, ids = found
        flat, spots = view.reshape(-1).copy(), np.flatnonzero(index >= 0)
        at = index.reshape(-1)[spots]
        self._put(place, flat, spots, ids[at], [(node, 0, int(x)) for x in at], Fraction(1))
        view[...] = flat.reshape(view.shape)

    def _constant(self, text: str, side: Side, place: Place, view: Array) -> None:
        """What is 0 or 1 in both fields, such as the gradient of what softmax does not see."""
        key = side.keys(place, view.shape)
        for value in (ZERO, ONE):
            if key is None or not (there := (key == _KEYS[value]) & (view > ONE)).any():
                continue
            flat = np.flatnonzero(there.reshape(-1))
            ids = view.reshape(-1)[flat]
            for part in _by_group(self._d, ids):
                part = part[self._lemmas.alike(ids[part], np.full(part.size, value, np.int64), _NEAR, needed=False)]
                if part.size:
                    self._known.learn(ids[part], np.full(part.size, value, np.int64))
                    found = view.reshape(-1).copy()
                    found[flat[part]] = value
                    view[...] = found.reshape(view.shape)
                    self.merges.setdefault(_key(text, place), []).extend([spot, _CONSTANT, 0, value, 1, 1] for spot in flat[part].tolist())

    def _left(self, place: Place, view: Array) -> bool:
        """Replace what is shown; whether something is left whose value the reference has and whose formula is another one."""
        flat, left, kind = view.reshape(-1).copy(), False, kind_of(self._tapes[place[0]].nodes[place[1]], place[2])
        todo = (flat > ONE) & ~self._d.is_named(flat)  # what is a result of the reference already stays it
        met: Counter[tuple[int, int, Fraction]] = Counter()
        for factor in self._factors:
            if not todo.any():
                break
            rows = self._rows.of(place, view.shape, factor)
            hit = np.flatnonzero(todo & (rows >= 0))
            if not hit.size:
                continue
            todo[hit] = False
            near = hit[self._rows.only_near[hit]]
            if near.size > _FEW and self._none_of(flat, near[:: near.size // _FEW], rows, factor):
                left, hit = True, hit[~self._rows.only_near[hit]]
            alike = self._rows.alike(place, view.shape, factor, kind)
            first, rest = hit[alike[hit] >= 0], hit[alike[hit] < 0]
            for spots, found in ((first, alike), (rest, rows)):
                met.update((node, k, factor) for node, k, _ in map(self._rows.place, found[spots].tolist()))
                other = self._replace(place, flat, spots, found[spots], factor)
                if spots is first:  # what the same operation did not make in the same way may have been made by another one
                    other = self._replace(place, flat, other, rows[other], factor)
                left |= bool(other.size)
        key = self._here.keys(place, view.shape)
        if key is not None and (zero := np.flatnonzero(todo & (key.reshape(-1) == 0))).size:
            self._put_zeros(place, flat, zero, [one for one, _ in met.most_common(1)])
        view[...] = flat.reshape(view.shape)
        return left

    def _none_of(self, flat: Array, spots: Array, rows: Array, factor: Fraction) -> bool:
        """Whether none of some elements, which doubles alone say to be the reference's, is shown: a sum without a bias that begins with zeros has the values of the one with it."""
        scaled = self._d.mul(self._rows.ids[rows[spots]], np.asarray(self._d.const(1 / factor)))
        return not self._lemmas.alike(flat[spots], scaled).any()

    def _replace(self, place: Place, flat: Array, spots: Array, rows: Array, factor: Fraction) -> Array:
        """Put the reference's elements of some rows where they are shown to be the same; spots at which they are not."""
        return self._put(place, flat, spots, self._rows.ids[rows], [self._rows.place(row) for row in rows.tolist()], factor) if spots.size else spots

    def _put(self, place: Place, flat: Array, spots: Array, target: Array, to: Sequence[tuple[int, int, int]], factor: Fraction) -> Array:
        scaled = target if factor == 1 else self._d.mul(target, np.asarray(self._d.const(1 / factor)))
        other, left = np.flatnonzero(flat[spots] != scaled), [spots[:0]]
        for part in _by_group(self._d, target[other]):
            alike = self._lemmas.alike(flat[spots[other[part]]], scaled[other[part]])
            chosen = other[part[alike]]
            left.append(spots[other[part[~alike]]])
            if chosen.size:
                self._known.learn(flat[spots[chosen]], scaled[chosen])
                flat[spots[chosen]] = scaled[chosen]
                found = [[int(spots[c]), *to[c], factor.numerator, factor.denominator] for c in chosen.tolist()]
                self.merges.setdefault(_key("candidate", place), []).extend(found)
        return np.concatenate(left)

    def _put_zeros(self, place: Place, flat: Array, spots: Array, met: Sequence[tuple[int, int, Fraction]]) -> None:
        """What is 0 tells nothing of where it comes from: it is sought where its neighbours are, or where the same operation is."""
        node = self._tapes[place[0]].nodes[place[1]]
        tried = [*met, *((n, k, factor) for n, k in self._zeros.like(node) for factor in self._factors[:1])]
        for n, k, factor in tried[:_TRIES]:
            at, ids = self._zeros.of.get((n, k), (np.zeros(0, np.int64),) * 2)
            for start in range(0, len(at) - len(spots) + 1, max(1, min(len(spots), len(at) - len(spots)))):
                chosen = slice(start, start + len(spots))
                if not self._put(place, flat, spots, ids[chosen], [(n, k, int(x)) for x in at[chosen]], factor).size:
                    return


class Zeros:
    """Results of the reference that are 0, and are not written down as 0. `of`: (node, number) → positions and elements."""

    def __init__(self, domain: Applied, side: Side) -> None:
        self._d, self._side = domain, side
        self.of: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._like: dict[tuple[str, str, str], list[tuple[int, int]]] = {}

    def made(self, place: Place, tape: Tape, view: Array) -> None:
        """A result of the reference."""
        key = self._side.keys(place, view.shape)
        if key is not None and (zero := np.flatnonzero((key.reshape(-1) == 0) & (view.reshape(-1) > ONE))).size:
            node = tape.nodes[place[1]]
            self.of[place[1], place[2]] = zero, view.reshape(-1)[zero].copy()
            self._like.setdefault((node.op, node.module, node.phase), []).append((place[1], place[2]))

    def like(self, node: Node) -> list[tuple[int, int]]:
        """Where the reference has zeros by the same operation of the same module."""
        return self._like.get((node.op, node.module, node.phase), [])


class Known:
    """What was shown to be what: an element that is made again, by another microbatch or rank, is replaced without a lemma."""

    def __init__(self, domain: Applied) -> None:
        self._d = domain
        self._of: dict[int, int] = {}
        self._groups: set[int] = set()

    def learn(self, ids: Array, target: Array) -> None:
        """Elements are what others are, without the numbers in front of them."""
        cores, numbers = self._d.scalars.split(ids)
        target = self._d.mul(target, self._d.scalars.inverse(numbers))
        self._of.update(zip(cores.tolist(), target.tolist()))
        self._groups.update(np.unique(self._d.groups_of(cores)).tolist())

    def put(self, view: Array) -> None:
        """Replace what is known."""
        if not self._groups.isdisjoint(np.unique(self._d.groups_of(self._d.scalars.cores(view))).tolist()):
            cores, numbers = self._d.scalars.split(view)
            distinct, back = np.unique(cores, return_inverse=True)
            found = np.array([self._of.get(x, x) for x in distinct.tolist()], np.int64)
            if (found != distinct).any():
                view[...] = self._d.scaled(found[back].reshape(view.shape), numbers)


class NotShown(Exception):
    """A proof that is checked again has a lemma that is not shown: it is none."""


class Again:
    """Merges where they are said to be; each is shown before it is done."""

    def __init__(self, domain: Applied, lemmas: Lemmas, merges: Merges) -> None:
        self._d, self._lemmas, self.merges = domain, lemmas, merges
        self._needed = {(row[1], row[2]) for rows in merges.values() for row in rows}
        self._kept: dict[tuple[int, int], Array] = {}
        self._known = Known(domain)

    def reference(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the reference."""
        for k, view in enumerate(views, first):
            self._do("reference", (rank, node, k), view)
            name_groups(self._d, view)
            if (node, k) in self._needed:
                self._kept[node, k] = view.reshape(-1).copy()

    def candidate(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        for k, view in enumerate(views, first):
            self._do("candidate", (rank, node, k), view)

    def _do(self, text: str, place: Place, view: Array) -> None:
        rows = self.merges.get(_key(text, place), [])
        self._known.put(view)
        made = view.reshape(-1).copy()
        flat = made.copy()
        for factor in dict.fromkeys((row[1] == _CONSTANT, row[4], row[5]) for row in rows):
            chosen = [row for row in rows if (row[1] == _CONSTANT, row[4], row[5]) == factor]
            spots = np.array([row[0] for row in chosen])
            if factor[0]:
                target = scaled = np.array([ONE if row[3] else ZERO for row in chosen], np.int64)
            else:
                own = place[1:] if text == "reference" else None  # an element of the same result, as it was made
                target = np.array([(made if (row[1], row[2]) == own else self._kept[row[1], row[2]])[row[3]] for row in chosen])
                scaled = self._d.mul(target, np.asarray(self._d.const(Fraction(factor[2], factor[1]))))
            for part in _by_group(self._d, flat[spots] if factor[0] else target):
                if not self._lemmas.same(flat[spots[part]], scaled[part]):
                    raise NotShown(f"a lemma of the proof was not shown again ({text})")
                self._known.learn(flat[spots[part]], scaled[part])
                flat[spots[part]] = scaled[part]
        if rows:
            view[...] = flat.reshape(view.shape)


def name_groups(domain: Applied, view: Array) -> None:
    """Formulas are cut at the operations that made these elements."""
    for group in np.unique(domain.groups_of(domain.scalars.cores(view.reshape(-1)))).tolist():
        if domain.kinds[group] == APPLIED:
            domain.named[group] = 1


def _key(text: str, place: Place) -> str:
    return f"{text} {place[0]} {place[1]} {place[2]}"


def _by_group(domain: Applied, ids: Array) -> list[Any]:
    """Positions of elements, those that one operation made together."""
    if not ids.size:
        return []
    groups = domain.groups_of(ids)
    return [np.flatnonzero(groups == g) for g in dict.fromkeys(groups.tolist())]
