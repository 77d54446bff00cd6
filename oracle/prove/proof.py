"""The proof: both programs once more in polynomials, cut by names where both sides computed the same values.

Names are put where elements agree in two fields, or in doubles, which know more laws; so formulas stay small. That they agree is
not used. Equal ids of an output are a proof over the rationals with uninterpreted functions, at this shape; unequal ids prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec
import numpy as np

from proctor.oracle.prove.domains.field import P
from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.judge import Runs
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.machine import Seen
from proctor.oracle.prove.tape import Array, Tape

Place = tuple[int, int, int]  # rank, node, number of the result
_NEAR: Final = 1e-10
_MOST_OF_IT: Final = 0.9
_MOST: Final = 4096


class Proof(msgspec.Struct):
    """What came of it.

    Attributes:
        open: outputs whose formulas are not the same, ("grad", name, rank); empty when all are proved.
        why: it ended early.
        polynomials, atoms: how many there are.
        cuts: where names were put: "side rank node result" → bits of the elements, as hexadecimal text.
        parts: of what is open, the first operation whose values are the reference's and whose formulas are not.
    """

    open: list[tuple[str, str, int]] = []
    why: str = ""
    polynomials: int = 0
    atoms: int = 0
    cuts: dict[str, str] = {}
    parts: str = ""


def attempt(
    reference: Tape, candidate: Sequence[Tape], alignment: Alignment, observed: Sequence[Observed], doubles: Observed, *, budget_s: float, terms: int = 20_000_000
) -> Proof:
    """Try to prove.

    Args:
        observed: the runs in two fields.
        doubles: the run in doubles.
        budget_s: after which it ends.
        terms: that may be stored.
    """
    until = time.monotonic() + budget_s
    domain = Poly(terms, until)
    factors = _factors(candidate)
    cuts: dict[str, str] = {}
    there, here = (_Side([*(_results(o, side) for o in observed), _results(doubles, side)]) for side in (0, 1))
    named = _namer(domain, there, here, factors, until, ("reference", cuts)), _namer(domain, here, there, factors, until, ("candidate", cuts))
    parting = _Parting(here, there)
    try:
        runs = Runs.of(domain, reference, candidate, alignment, (parting.reference, parting.candidate), named)
    except OutOfBudget as error:
        return Proof(why=f"the proof is out of budget: {error}", polynomials=len(domain.polys), atoms=len(domain.atoms))
    left = [(what, name, rank) for what, name, rank, _, a, b in runs.pairs(alignment) if not np.array_equal(a, b)]
    return Proof(left, "", len(domain.polys), len(domain.atoms), cuts, parting.first(candidate) if left else "")


def replayed(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, cuts: dict[str, str], terms: int = 20_000_000) -> Proof:
    """A proof again, with names where it says: no field, no search. Names are sound wherever they are."""
    domain = Poly(terms)

    def namer(side: str) -> Seen:
        def named(rank: int, node: int, views: list[Array], first: int) -> None:
            for k, view in enumerate(views, first):
                bits = cuts.get(f"{side} {rank} {node} {k}")
                if bits is not None:
                    there = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=view.size).astype(bool).reshape(view.shape)
                    view[there] = domain.each(domain.name_of, view[there])

        return named

    try:
        runs = Runs.of(domain, reference, candidate, alignment, named=(namer("reference"), namer("candidate")))
    except OutOfBudget as error:
        return Proof(why=f"out of budget: {error}")
    left = [(what, name, rank) for what, name, rank, _, a, b in runs.pairs(alignment) if not np.array_equal(a, b)]
    why = "operators without a meaning" if runs.reference.opaque or runs.candidate.opaque else ""
    return Proof(left, why, len(domain.polys), len(domain.atoms), cuts)


Results = dict[Place, Array]


def _results(observed: Observed, side: int) -> Results:
    """What a side computed, by rank, node and number of the result."""
    found = {(*key, k): value for key, values in (observed.there, observed.here)[side].items() for k, value in enumerate(values)}
    return found | observed.between[side]


class _Side:
    """All that one side computed, in two fields and in doubles, and what it is to the other."""

    def __init__(self, runs: Sequence[Results]) -> None:
        self._one, self._two, self._doubles = runs
        pairs = [_joined(a, self._two[key]).reshape(-1) for key, a in self._one.items() if key in self._two]
        self._keys = np.unique(np.concatenate([np.zeros(1, np.int64), *pairs]))
        values = np.unique(np.concatenate([np.zeros(1), *(v.reshape(-1) for v in self._doubles.values())]))
        self._values = values[np.isfinite(values)]

    def found_in(self, other: _Side, place: Place, shape: tuple[int, ...], factors: Sequence[Fraction]) -> Array:
        """Which elements of a result the other side has as well, up to a factor."""
        there = np.zeros(shape, bool)
        a, b, value = self._one.get(place), self._two.get(place), self._doubles.get(place)
        for factor in factors:
            if there.all():
                break
            if a is not None and b is not None and a.shape == shape:
                f = factor.numerator * pow(factor.denominator, -1, P)
                there |= other._has_key(_joined(a * f % P, b * f % P))
            if value is not None and value.shape == shape:
                near = other._has_value(value * float(factor))
                if near.mean() > _MOST_OF_IT:  # single doubles meet by chance, and would be named where nothing is to be
                    there |= near
        return there

    def _has_key(self, key: Array) -> Array:
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.asarray(self._keys[at] == key)

    def _has_value(self, value: Array) -> Array:
        at = np.searchsorted(self._values, value)
        near = [np.abs(self._values[np.clip(at + k, 0, len(self._values) - 1)] - value) for k in (-1, 0)]
        with np.errstate(invalid="ignore"):
            return np.asarray(np.minimum(*near) <= _NEAR * np.abs(value))


class _Parting:
    """Where formulas part though values do not."""

    def __init__(self, here: _Side, there: _Side) -> None:
        self._here, self._there = here, there
        self._known: set[int] = set()
        self._open: tuple[int, int] | None = None

    def reference(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the reference, which runs first."""
        for view in views:
            self._known.update(np.unique(view).tolist())

    def candidate(self, rank: int, node: int, views: list[Array], first: int) -> None:
        """Called for every node of the candidate."""
        if self._open is None and first == 0:
            for k, view in enumerate(views):
                same = self._here.found_in(self._there, (rank, node, k), view.shape, [Fraction(1)])
                if any(x not in self._known for x in np.unique(view[same]).tolist()):
                    self._open = rank, node

    def first(self, tapes: Sequence[Tape]) -> str:
        """The operation, with its place."""
        if self._open is None:
            return ""
        node = tapes[self._open[0]].nodes[self._open[1]]
        return f"{node.op} in {node.module or 'no module'} ({node.phase}) at {node.place or 'no line'} on rank {self._open[0]}"


def _joined(a: Array, b: Array) -> Array:
    return (a.astype(np.int64) << 31) ^ b.astype(np.int64)


def _factors(candidate: Sequence[Tape]) -> list[Fraction]:
    """1, and what ranks and microbatches divide by: sizes of groups, and small whole numbers that the program divides or multiplies by."""
    sizes = {len(node.ranks) for tape in candidate for node in tape.nodes if node.ranks} | {len(candidate)}
    for tape in candidate:
        for node in tape.nodes:
            if node.op.startswith(("aten.div", "aten.mul")):
                sizes.update(int(x) for x in node.args if isinstance(x, int | float) and not isinstance(x, bool) and 1 < x <= _MOST and x == int(x))
    found = sorted(n for n in sizes if n > 1)
    return [Fraction(1), *(Fraction(n) for n in found), *(Fraction(1, n) for n in found)]


def _namer(domain: Poly, side: _Side, other: _Side, factors: Sequence[Fraction], until: float, kept: tuple[str, dict[str, str]]) -> Seen:
    text, cuts = kept

    def named(rank: int, node: int, views: list[Array], first: int) -> None:
        if time.monotonic() > until:
            raise OutOfBudget("more time than the budget allows")
        for k, view in enumerate(views, first):
            there = side.found_in(other, (rank, node, k), view.shape, factors)
            if there.any():
                cuts[f"{text} {rank} {node} {k}"] = np.packbits(there).tobytes().hex()
                view[there] = domain.each(domain.name_of, view[there])

    return named
