"""The proof: both programs once more as formulas, compared where both sides computed the same values.

By lemmas first (`chase.py`): small ones, each shown once for all layers, microbatches and ranks that bring it again. Where half of the time leaves
something open, by polynomials of the whole step, cut by names (`sweep.py`). That values agree, in two fields or in doubles, only says where to look. Equal
formulas of an output are a proof over the rationals with uninterpreted functions, at this shape; unequal ones prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from proctor.oracle.prove.domains.applied import Applied
from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.judge import Runs
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.proofs.chase import Again, Chase, NotShown
from proctor.oracle.prove.proofs.lemma import Lemmas
from proctor.oracle.prove.proofs.sweep import Replay, Side, Sweep, factors_of, results
from proctor.oracle.prove.tape import Tape

_FIRST: Final = 0.5  # of the time, for lemmas; what is left is for the whole step


class Proof(msgspec.Struct):
    """What came of it.

    Attributes:
        open: outputs whose formulas are not the same, ("grad", name, rank); empty when all are proved.
        why: it ended early.
        polynomials, atoms: how many there are.
        cuts, lemmas: where names were put, and what was merged: as `sweep.py` says.
        parts: of what is open, the first operation whose values are the reference's and whose formulas are not.
        local: it is by lemmas: `lemmas` alone are the proof, and there are no names.
        shown, used: how many different lemmas were shown, and how often one was used.
    """

    open: list[tuple[str, str, int]] = []
    why: str = ""
    polynomials: int = 0
    atoms: int = 0
    cuts: dict[str, str] = {}
    lemmas: dict[str, list[list[int]]] = {}
    parts: str = ""
    local: bool = False
    shown: int = 0
    used: int = 0


def attempt(
    reference: Tape, candidate: Sequence[Tape], alignment: Alignment, observed: Sequence[Observed], doubles: Observed, *, budget_s: float, terms: int = 20_000_000
) -> Proof:
    """Try to prove.

    Args:
        observed: the runs in two fields.
        doubles: the run in doubles.
        budget_s: seconds of CPU after which it ends.
        terms: that may be stored.
    """
    began = time.process_time()
    there, here = (Side([*(results(o, side) for o in observed), results(doubles, side)]) for side in (0, 1))
    factors = factors_of(reference, candidate)

    def local(until: float) -> Proof:
        lemmas = Lemmas(Applied(), until)
        return _by_lemmas(reference, candidate, alignment, lemmas, Chase(lemmas.domain, lemmas, (there, here), factors, (reference, candidate), alignment))

    def whole(until: float) -> Proof:
        domain = Poly(terms, until)
        sweep = Sweep(domain, there, here, factors, until)
        try:
            runs = Runs.of(domain, reference, candidate, alignment, named=(sweep.reference, sweep.candidate))
            left = _open(domain, runs, alignment)
        except OutOfBudget as error:
            return Proof([], f"the proof is out of budget: {error}", len(domain.polys), len(domain.atoms))
        return Proof(left, "", len(domain.polys), len(domain.atoms), sweep.cuts, sweep.lemmas, _said(candidate, sweep.parts) if left else "")

    first = local(began + _FIRST * budget_s)
    if not first.open and not first.why:
        return first
    second = whole(began + budget_s)
    if second.why:
        second.open, second.parts = first.open, first.parts
        second.polynomials, second.atoms = second.polynomials + first.polynomials, second.atoms + first.atoms
    return second


def _by_lemmas(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, lemmas: Lemmas, guide: Chase | Again) -> Proof:
    """Run both sides in formulas that are not written out, and compare the outputs."""
    try:
        runs = Runs.of(lemmas.domain, reference, candidate, alignment, named=(guide.reference, guide.candidate))
        left = []
        for what, name, rank, _, there, here in runs.pairs(alignment):
            if not lemmas.same(here, there):
                left.append((what, name, rank))
                if isinstance(guide, Again):  # a proof that is checked is whole or none
                    break
    except OutOfBudget as error:
        return Proof(why=f"the proof is out of budget: {error}", polynomials=lemmas.polynomials, atoms=lemmas.atoms)
    except NotShown as error:
        return Proof(why=str(error), polynomials=lemmas.polynomials, atoms=lemmas.atoms)
    opaque = bool(runs.reference.opaque or runs.candidate.opaque)
    parts = _said(candidate, guide.parts) if left and isinstance(guide, Chase) else ""
    merges = guide.merges
    return Proof(left, "operators without a meaning" if opaque else "", lemmas.polynomials, lemmas.atoms, {}, merges, parts, True, lemmas.shown, lemmas.used)


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


def replayed(reference: Tape, candidate: Sequence[Tape], alignment: Alignment, proof: Proof, terms: int = 20_000_000, seconds: float = 120.0) -> Proof:
    """A proof again, with names and merges where it says: no field, no search. Names are sound wherever they are, and lemmas are shown again."""
    if proof.local:
        lemmas = Lemmas(Applied(), time.process_time() + seconds)
        return _by_lemmas(reference, candidate, alignment, lemmas, Again(lemmas.domain, lemmas, proof.lemmas))
    domain = Poly(terms)
    replay = Replay(domain, proof.cuts, proof.lemmas)
    try:
        runs = Runs.of(domain, reference, candidate, alignment, named=(replay.reference, replay.candidate))
        left = _open(domain, runs, alignment)
    except OutOfBudget as error:
        return Proof(why=f"out of budget: {error}")
    why = "operators without a meaning" if runs.reference.opaque or runs.candidate.opaque else ""
    return Proof(left, why, len(domain.polys), len(domain.atoms), proof.cuts, proof.lemmas)
