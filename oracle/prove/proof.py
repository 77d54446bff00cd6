"""The proof: both programs once more in polynomials, cut by names where the field found the same values on both sides.

Names are put where tensors agree in two fields, so that formulas stay small; that they agree is not used. Equal ids of an output
are a proof over the rationals with uninterpreted functions, at this shape; unequal ids prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from proctor.oracle.prove.domains.field import P
from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.judge import Runs
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.machine import Seen
from proctor.oracle.prove.tape import Array, Tape

Key = tuple[int, int]


class Proof(msgspec.Struct):
    """What came of it.

    Attributes:
        open: outputs whose formulas are not the same, ("grad", name, rank); empty when all are proved.
        why: it ended early.
        polynomials, atoms: how many there are.
        cuts: where names were put: "side rank node result" → bits of the elements, as hexadecimal text.
    """

    open: list[tuple[str, str, int]] = []
    why: str = ""
    polynomials: int = 0
    atoms: int = 0
    cuts: dict[str, str] = {}


def attempt(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, observed: Sequence[Observed], *, budget_s: float, terms: int = 20_000_000) -> Proof:
    """Try to prove.

    Args:
        observed: the runs in two fields.
        budget_s: after which it ends.
        terms: that may be stored.
    """
    until = time.monotonic() + budget_s
    domain = Poly(terms, until)
    here, there = _keys(o.here for o in observed), _keys(o.there for o in observed)
    factors = _factors(candidate)
    cuts: dict[str, str] = {}
    named = (
        _namer(domain, there, _known(here), factors, until, ("reference", cuts)), _namer(domain, here, _known(there), factors, until, ("candidate", cuts))
    )
    try:
        runs = Runs.of(domain, reference, candidate, alignment, named=named)
    except OutOfBudget as error:
        return Proof(why=f"the proof is out of budget: {error}", polynomials=len(domain.polys), atoms=len(domain.atoms))
    left = [(what, name, rank) for what, name, rank, _, a, b in runs.pairs(alignment) if not np.array_equal(a, b)]
    return Proof(left, "", len(domain.polys), len(domain.atoms), cuts)


def replayed(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, cuts: dict[str, str], terms: int = 20_000_000) -> Proof:
    """A proof again, with names where it says: no field, no search. Names are sound wherever they are."""
    domain = Poly(terms)

    def namer(side: str) -> Seen:
        def named(rank: int, node: int, views: list[Array]) -> None:
            for k, view in enumerate(views):
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


def _keys(sides: Iterable[dict[Key, list[Array]]]) -> dict[Key, list[tuple[Array, Array]]]:
    one, two = sides
    return {key: list(zip(values, two.get(key, []))) for key, values in one.items()}


def _joined(a: Array, b: Array) -> Array:
    return (a.astype(np.int64) << 31) ^ b.astype(np.int64)


def _known(keys: dict[Key, list[tuple[Array, Array]]]) -> Array:
    return np.unique(np.concatenate([np.zeros(1, np.int64), *(_joined(a, b).reshape(-1) for pairs in keys.values() for a, b in pairs)]))


def _factors(candidate: Sequence[Tape]) -> list[int]:
    sizes = {len(node.ranks) for tape in candidate for node in tape.nodes if node.ranks} | {len(candidate)}
    return [1, *(n for n in sizes if n > 1), *(pow(n, -1, P) for n in sizes if n > 1)]


def _namer(domain: Poly, keys: dict[Key, list[tuple[Array, Array]]], other: Array, factors: list[int], until: float, kept: tuple[str, dict[str, str]]) -> Seen:
    side, cuts = kept

    def named(rank: int, node: int, views: list[Array]) -> None:
        if time.monotonic() > until:
            raise OutOfBudget("more time than the budget allows")
        for k, (view, (a, b)) in enumerate(zip(views, keys.get((rank, node), []))):
            there = np.zeros(view.shape, bool)
            for f in factors:
                if there.all():
                    break
                key = _joined(a * f % P, b * f % P)
                at = np.minimum(np.searchsorted(other, key), len(other) - 1)
                there |= other[at] == key
            if there.any():
                cuts[f"{side} {rank} {node} {k}"] = np.packbits(there).tobytes().hex()
                view[there] = domain.each(domain.name_of, view[there])

    return named
