"""The proof: both programs once more in polynomials, cut by names where both sides computed the same values.

Names are put where elements agree in two fields, or in doubles, which know more laws; so formulas stay small. That they agree is
not used. Equal ids of an output are a proof over the rationals with uninterpreted functions, at this shape; unequal ids prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.judge import Runs
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.proofs.sweep import Replay, Side, Sweep, factors_of, results
from proctor.oracle.prove.tape import Tape


class Proof(msgspec.Struct):
    """What came of it.

    Attributes:
        open: outputs whose formulas are not the same, ("grad", name, rank); empty when all are proved.
        why: it ended early.
        polynomials, atoms: how many there are.
        cuts, lemmas: where names were put, and what was merged: as `sweep.py` says.
        parts: of what is open, the first operation whose values are the reference's and whose formulas are not.
    """

    open: list[tuple[str, str, int]] = []
    why: str = ""
    polynomials: int = 0
    atoms: int = 0
    cuts: dict[str, str] = {}
    lemmas: dict[str, list[list[int]]] = {}
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
    there, here = (Side([*(results(o, side) for o in observed), results(doubles, side)]) for side in (0, 1))
    sweep = Sweep(domain, there, here, factors_of(reference, candidate), until)
    try:
        runs = Runs.of(domain, reference, candidate, alignment, named=(sweep.reference, sweep.candidate))
        left = _open(domain, runs, alignment)
    except OutOfBudget as error:
        return Proof(why=f"the proof is out of budget: {error}", polynomials=len(domain.polys), atoms=len(domain.atoms))
    return Proof(left, "", len(domain.polys), len(domain.atoms), sweep.cuts, sweep.lemmas, _said(candidate, sweep.parts) if left else "")


def _open(domain: Poly, runs: Runs, alignment: Alignment) -> list[tuple[str, str, int]]:
    """Outputs whose formulas are not the same, names taken off where they have to be."""
    found = []
    for what, name, rank, _, there, here in runs.pairs(alignment):
        if not all(domain.same(x, y) for x, y in zip(there.tolist(), here.tolist())):
            found.append((what, name, rank))
    return found


def _said(tapes: Sequence[Tape], at: tuple[int, int] | None) -> str:
    if at is None:
        return ""
    node = tapes[at[0]].nodes[at[1]]
    return f"; formulas part at {node.op} in {node.module or 'no module'} ({node.phase}) at {node.place or 'no line'} on rank {at[0]}"


def replayed(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, cuts: dict[str, str], lemmas: dict[str, list[list[int]]], terms: int = 20_000_000) -> Proof:
    """A proof again, with names where it says: no field, no search. Names are sound wherever they are, and lemmas are shown again."""
    domain = Poly(terms)
    replay = Replay(domain, cuts, lemmas)
    try:
        runs = Runs.of(domain, reference, candidate, alignment, named=(replay.reference, replay.candidate))
        left = _open(domain, runs, alignment)
    except OutOfBudget as error:
        return Proof(why=f"out of budget: {error}")
    why = "operators without a meaning" if runs.reference.opaque or runs.candidate.opaque else ""
    return Proof(left, why, len(domain.polys), len(domain.atoms), cuts, lemmas)
