"""Where formulas are cut: elements that both sides compute get one name, and what a name hides is looked into where it has to be.

That two elements agree in two fields, or in doubles, which know more laws, only says where to look. A name is sound wherever it is
put (`domains/poly.py`). Where an element of the candidate has another formula than the reference's element of the same value, their
difference is written out, name by name; if it is 0 the reference's formula takes the place. So each cut is a lemma of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.field import P
from proctor.oracle.prove.domains.poly import ZERO, OutOfBudget, Poly
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.tape import Array, Node, Tape

Place = tuple[int, int, int]  # rank, node, number of the result
Results = dict[Place, Array]
_NEAR: Final = 1e-10
_MOST_OF_IT: Final = 0.9
_MOST: Final = 64
_TRIES: Final = 8  # of formulas that are not shown to be equal, in one result


def results(observed: Observed, side: int) -> Results:
    """What a side computed, by rank, node and number of the result."""
    found = {(*key, k): value for key, values in (observed.there, observed.here)[side].items() for k, value in enumerate(values)}
    return found | observed.between[side]


class Side:
    """All that one side computed, in two fields and in doubles."""

    def __init__(self, runs: Sequence[Results]) -> None:
        self._one, self._two, self._doubles = runs
        pairs = [joined(a, self._two[key]).reshape(-1) for key, a in self._one.items() if key in self._two]
        self._keys = np.unique(np.concatenate([np.zeros(1, np.int64), *pairs]))
        values = np.unique(np.concatenate([np.zeros(1), *(v.reshape(-1) for v in self._doubles.values())]))
        self._values = values[np.isfinite(values)]

    def keys(self, place: Place, shape: tuple[int, ...], factor: Fraction = Fraction(1)) -> Array | None:
        """62 bits an element, times a factor; None where the fields did not run."""
        a, b = self._one.get(place), self._two.get(place)
        if a is None or b is None or a.shape != shape:
            return None
        f = factor.numerator * pow(factor.denominator, -1, P) % P
        return joined(a * f % P, b * f % P)

    def doubles(self, place: Place, shape: tuple[int, ...]) -> Array | None:
        """Elements as doubles."""
        value = self._doubles.get(place)
        return value if value is not None and value.shape == shape else None

    def found_in(self, other: Side, place: Place, shape: tuple[int, ...], factors: Sequence[Fraction]) -> Array:
        """Which elements of a result the other side has as well, up to a factor; what is 0 tells nothing of where it comes from."""
        there = np.zeros(shape, bool)
        value = self.doubles(place, shape)
        for factor in factors:
            if there.all():
                break
            key = self.keys(place, shape, factor)
            if key is not None:
                there |= (other._keys[_at(other._keys, key)] == key) & (key != 0)
            if value is not None:
                near = is_near(other._values, value * float(factor)) & (True if key is None else key != 0)
                if near.mean() > _MOST_OF_IT:  # single doubles meet by chance, and would be named where nothing is to be
                    there |= near
        return there


def _at(ordered: Array, key: Array) -> Array:
    return np.minimum(np.searchsorted(ordered, key), len(ordered) - 1)


def is_near(ordered: Array, value: Array) -> Array:
    """Which doubles are nearly one of a list."""
    at = np.searchsorted(ordered, value)
    near = [np.abs(ordered[np.clip(at + k, 0, len(ordered) - 1)] - value) for k in (-1, 0)]
    with np.errstate(invalid="ignore"):
        return np.asarray(np.minimum(*near) <= _NEAR * np.abs(value))


def joined(a: Array, b: Array) -> Array:
    """Elements of two fields as one key."""
    return (a.astype(np.int64) << 31) ^ b.astype(np.int64)


def factors_of(reference: Tape, candidate: Sequence[Tape]) -> list[Fraction]:
    """1, and what ranks and microbatches divide by: sizes of groups, and numbers by which one side divides where the other does not."""
    sizes = {len(node.ranks) for tape in candidate for node in tape.nodes if node.ranks} | {len(candidate)}
    there, here = _divided(reference), {one for tape in candidate for one in _divided(tape)}
    found = sorted(n for n in sizes | {n for _, _, n in there ^ here} if n > 1)
    return [Fraction(1), *(Fraction(n) for n in found), *(Fraction(1, n) for n in found)]


def divisors(tape: Tape) -> set[int]:
    """Small whole numbers by which a rank divides or multiplies."""
    return {n for _, _, n in _divided(tape)}


def _divided(tape: Tape) -> set[tuple[str, str, int]]:
    """With the operation and its module: a quarter of a loss is another thing than a quarter of a score."""
    nodes = [node for node in tape.nodes if node.op.startswith(("aten.div", "aten.mul"))]
    numbers = [(node, x) for node in nodes for x in node.args if isinstance(x, int | float) and x]
    whole = {(node.op, node.module, round(max(abs(x), 1 / abs(x)))) for node, x in numbers if min(abs(x % 1), abs((1 / x) % 1)) < 1e-9}
    return {one for one in whole if 1 < one[2] <= _MOST}


class Rows:
    """The reference's elements, to be found by their values.

    Attributes:
        ids: of the domain, by row.
        only_near: of the elements that `of` was asked for last, those that doubles alone say to be the same.
    """

    def __init__(self, there: Side, here: Side) -> None:
        self._there, self._here = there, here
        self._made: list[tuple[Array, Array, Array, tuple[int, int], int]] = []
        self.ids = self._where = self._keys = self._alike = np.zeros(1, np.int64)
        self._values = np.zeros(1)
        self._by_key = self._by_value = self._by_alike = np.full(1, -1, np.int64)
        self._nodes: list[tuple[int, int]] = []
        self.only_near = np.zeros(0, bool)

    def made(self, rank: int, node: int, k: int, view: Array, kind: int = 0) -> None:
        """A result of the reference; `kind`: of its operation (`kind_of`)."""
        key, value = self._there.keys((rank, node, k), view.shape), self._there.doubles((rank, node, k), view.shape)
        if key is not None and value is not None:
            self._made.append((key.reshape(-1), value.reshape(-1), view.reshape(-1).copy(), (node, k), kind))

    def place(self, row: int) -> tuple[int, int, int]:
        """Node, number of the result and position of a row."""
        return (*self._nodes[int(self._where[row, 0])], int(self._where[row, 1]))

    def of(self, place: Place, shape: tuple[int, ...], factor: Fraction) -> Array:
        """For each element of the candidate, times a factor, the row of the same value; -1 none."""
        if self._made:
            self._order()
        found = np.full(int(np.prod(shape)), -1, np.int64)
        key, value = self._here.keys(place, shape, factor), self._here.doubles(place, shape)
        if value is not None:
            value = value.reshape(-1) * float(factor)
            at = np.clip(np.searchsorted(self._values, value * (1 - _NEAR * np.sign(value))), 0, len(self._values) - 1)
            with np.errstate(invalid="ignore"):
                near = (np.abs(self._values[at] - value) <= _NEAR * np.abs(value)) & (True if key is None else key.reshape(-1) != 0)
            if near.size and near.mean() > _MOST_OF_IT:
                found[near] = self._by_value[at[near]]
        if key is not None:
            key = key.reshape(-1)
            at = _at(self._keys, key)
            hit = (self._keys[at] == key) & (key != 0)
            found[hit] = self._by_key[at[hit]]
            self.only_near = (found >= 0) & ~hit
        else:
            self.only_near = found >= 0
        return found

    def alike(self, place: Place, shape: tuple[int, ...], factor: Fraction, kind: int) -> Array:
        """As `of`, but of the operations of a kind alone: where several results have one value, such as a part of softmax's gradient and the rest of it,
        the one that the same operation made is the same formula at sight."""
        if self._made:
            self._order()
        key = self._here.keys(place, shape, factor)
        if key is None:
            return np.full(int(np.prod(shape)), -1, np.int64)
        key = key.reshape(-1)
        at = _at(self._alike, key ^ kind)
        return np.where((self._alike[at] == key ^ kind) & (key != 0), self._by_alike[at], -1)

    def _order(self) -> None:
        """The reference's elements as rows, and their keys and doubles in order."""
        self.ids = np.concatenate([view for _, _, view, _, _ in self._made])
        self._where = np.concatenate([np.stack([np.full(len(view), n), np.arange(len(view))], 1) for n, (_, _, view, _, _) in enumerate(self._made)])
        self._nodes = [node for _, _, _, node, _ in self._made]
        self._keys, self._by_key = np.unique(np.concatenate([key for key, _, _, _, _ in self._made]), return_index=True)
        self._alike, self._by_alike = np.unique(np.concatenate([key ^ kind for key, _, _, _, kind in self._made]), return_index=True)
        self._values, self._by_value = np.unique(np.concatenate([value for _, value, _, _, _ in self._made]), return_index=True)
        self._made = []


def kind_of(node: Node, k: int) -> int:
    """A number of an operation in its module, and of its result."""
    text = f"{node.op} {node.module} {node.phase} {k}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Sweep:
    """Puts names, and merges; `cuts` and `lemmas` say where, so that it can be done again without looking for it.

    Attributes:
        cuts: "side rank node result" → bits of the elements that were named, as hexadecimal text.
        lemmas: "rank node result" → for each merged element its position, the node, result and position in the reference, and the
            numerator and denominator of the factor between them; the reference's node is -1 for what was shown to be 0.
        parts: the first operation of the candidate, as (rank, node), whose values are the reference's and whose formulas are not.
    """

    def __init__(self, domain: Poly, there: Side, here: Side, factors: Sequence[Fraction], until: float) -> None:
        self._d, self._there, self._here, self._factors, self._until = domain, there, here, factors, until
        self.cuts: dict[str, str] = {}
        self.lemmas: dict[str, list[list[int]]] = {}
        self.parts: tuple[int, int] | None = None
        self._rows = Rows(there, here)

    def reference(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the reference, which runs first."""
        for k, view in enumerate(views, first):
            self._name("reference", self._there, self._here, (rank, node, k), view)
            self._rows.made(rank, node, k, view)

    def candidate(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        for k, view in enumerate(views, first):
            there = self._name("candidate", self._here, self._there, (rank, node, k), view)
            left = self._merge((rank, node, k), view, there)
            if left and self.parts is None and first == 0:
                self.parts = rank, node

    def _name(self, text: str, side: Side, other: Side, place: Place, view: Array) -> Array:
        if time.process_time() > self._until:
            raise OutOfBudget("more time than the budget allows")
        there = side.found_in(other, place, view.shape, self._factors)
        if there.any():
            self.cuts[f"{text} {place[0]} {place[1]} {place[2]}"] = np.packbits(there).tobytes().hex()
            view[there] = self._d.each(self._d.name_of, view[there])
        self._zero(text, side, place, view)
        return there

    def _zero(self, text: str, side: Side, place: Place, view: Array) -> None:
        """What is 0 in both fields, such as the gradient of what softmax does not see."""
        key = side.keys(place, view.shape)
        if key is None or not (zeros := (key == 0) & (view != ZERO)).any():
            return
        shown: list[list[int]] = []
        verdicts: dict[int, bool] = {}
        for x in np.unique(view[zeros]).tolist():
            if list(verdicts.values()).count(False) < _TRIES:
                verdicts[x] = self._d.same(x, ZERO)
        flat = view.reshape(-1).copy()
        for at in np.flatnonzero(zeros).tolist():
            if verdicts.get(int(flat[at])):
                flat[at] = ZERO
                shown.append([at, -1, 0, 0, 1, 1])
        view[...] = flat.reshape(view.shape)
        if shown:
            self.lemmas.setdefault(f"{text} {place[0]} {place[1]} {place[2]}", []).extend(shown)

    def _merge(self, place: Place, view: Array, there: Array) -> bool:
        """Whether something is left whose formula is another one."""
        tries, left, found = _TRIES, False, []
        todo, flat = there.reshape(-1).copy(), view.reshape(-1).copy()
        for factor in self._factors:
            rows = self._rows.of(place, view.shape, factor)
            hit = todo & (rows >= 0)
            todo &= ~hit
            scaled = self._d.mul(flat, np.asarray(self._d.const(factor))) if factor != 1 else flat
            for spot in np.flatnonzero(hit & (scaled != self._rows.ids[rows])).tolist():
                row = int(rows[spot])
                if tries > 0 and self._d.same(int(scaled[spot]), int(self._rows.ids[row])):
                    flat[spot] = self._d.mul(self._rows.ids[row], np.asarray(self._d.const(1 / factor)))
                    found.append([spot, *self._rows.place(row), factor.numerator, factor.denominator])
                else:
                    tries, left = tries - 1, True
            if not todo.any():
                break
        view[...] = flat.reshape(view.shape)
        if found:
            self.lemmas.setdefault(f"candidate {place[0]} {place[1]} {place[2]}", []).extend(found)
        return left


class Replay:
    """Names and merges where they are said to be; a merge is shown again before it is done."""

    def __init__(self, domain: Poly, cuts: dict[str, str], lemmas: dict[str, list[list[int]]]) -> None:
        self._d, self._cuts, self._lemmas = domain, cuts, lemmas
        self._needed = {(row[1], row[2]) for key, rows in lemmas.items() if key.startswith("candidate") for row in rows}
        self._kept: dict[tuple[int, int], Array] = {}

    def reference(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the reference."""
        for k, view in enumerate(views, first):
            self._name("reference", (rank, node, k), view)
            if (node, k) in self._needed:
                self._kept[node, k] = view.reshape(-1).copy()

    def candidate(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        for k, view in enumerate(views, first):
            self._name("candidate", (rank, node, k), view)

    def _name(self, text: str, place: Place, view: Array) -> None:
        key = f"{text} {place[0]} {place[1]} {place[2]}"
        bits = self._cuts.get(key)
        if bits is not None:
            there = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=view.size).astype(bool).reshape(view.shape)
            view[there] = self._d.each(self._d.name_of, view[there])
        for flat, node, k, position, over, under in self._lemmas.get(key, []):
            at: Any = np.unravel_index(flat, view.shape)
            factor = Fraction(over, under)
            other = ZERO if node < 0 else int(self._kept[node, k][position])
            scaled = int(self._d.mul(view[at], np.asarray(self._d.const(factor))))
            if factor and self._d.same(scaled, other):
                view[at] = self._d.mul(np.asarray(other), np.asarray(self._d.const(1 / factor)))


__all__ = ["Replay", "Rows", "Side", "Sweep", "factors_of", "results"]
