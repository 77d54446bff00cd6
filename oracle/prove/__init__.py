"""Is a parallel program the same formula as its single-device form? A proof for all data, beside the measured comparison.

    proctor oracle prove --reference "python train.py" --candidate "torchrun --nproc-per-node 4 train.py --tp 2"

    verdict = proctor.oracle.prove.prove(train_alone, train_parallel, "tp=2")

One training step of every rank is recorded as operations below autograd (`recording/`), and all ranks are run
together in other numbers (`machine.py`, `domains/`): doubles, a finite field, polynomials. Verdicts: `verdict.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove.verdict import Culprit, Verdict

if TYPE_CHECKING:
    from proctor.oracle.prove.cache import Cache
    from proctor.oracle.prove.recording.world import Program
    from proctor.oracle.prove.tape import Tape


def prove(reference: Program, candidate: Program, plan: Plan | str, *, proof_s: float = 120.0, many: bool = False, jobs: int = 1, cache: Path | None = None, small: tuple[Program, Program, str] | str | None = None) -> Verdict:
    """Judge two functions, each of which builds a model and trains one step of it.

    Args:
        reference: without arguments; called once, without a process group.
        candidate: the same; called once for each rank on a fake process group, and asks `torch.distributed` who it is.
        plan: with the mesh that says how many ranks there are ("dp=2,tp=2"), and layouts that are not found by content.
        proof_s: how long a proof may take, in seconds of CPU; 0 for refutation alone.
        many: for large meshes: run a few ranks of each kind, judge all of them together; a proof is that of `small` (`lanes/`).
        jobs: processes at once, with `many`; of several, one proves `small` from the beginning.
        small: with `many`: (reference, candidate, mesh) of the same kind with fewer layers, microbatches and ranks, which is proved by formulas;
            or a mesh alone, of the same functions. What it says of the large program: `lanes/reduced.py`.
        cache: a folder in which verdicts and proofs are kept by content; None to judge anew.

    Raises:
        OracleError: a function raises or trains nothing, or the plan has no mesh.
    """
    from proctor.errors import OracleError
    from proctor.oracle.prove.cache import Cache
    from proctor.oracle.prove.prover import decide
    from proctor.oracle.prove.recording.world import tape_of

    plan = Plan(plan) if isinstance(plan, str) else plan
    if not plan.mesh.axes:
        raise OracleError("the plan does not say how many ranks there are", hint='prove(reference, candidate, "tp=2")')
    kept = Cache(cache) if cache is not None else None
    if many:
        return _on_many(reference, candidate, plan, small=small, jobs=jobs, proof_s=proof_s, cache=kept)
    if small is not None:
        raise OracleError("a small program goes with many=True", hint="without it the program itself is proved")
    return decide(tape_of(reference), _all(candidate, plan), plan, proof_s=proof_s, cache=kept)


def _on_many(reference: Program, candidate: Program, plan: Plan, *, small: tuple[Program, Program, str] | str | None, jobs: int, proof_s: float, cache: Cache | None) -> Verdict:
    from proctor.oracle.prove import lanes
    from proctor.oracle.prove.lanes.spread import forking, uncollected
    from proctor.oracle.prove.recording.world import tape_of

    given = (reference, candidate, small) if isinstance(small, str) else small
    spread, recorded = forking(jobs), functools.cache(uncollected()(lambda: tape_of(reference)))

    def less() -> lanes.Reduced:
        assert given is not None
        there = plan.on(Mesh.parse(given[2]))
        return lanes.Reduced(recorded() if given[0] is reference else tape_of(given[0]), _all(given[1], there), there)

    def ranks(asked: Sequence[int]) -> list[Tape]:
        return [tape_of(candidate, rank, plan.mesh.world) for rank in asked]

    if given is not None and given[0] is reference:
        recorded()  # before there are two processes that need it
    with lanes.proving(spread, less if given is not None else None, proof_s, cache) as ahead:
        return lanes.decide(recorded(), ranks, plan, spread, small=less if given is not None else None, proof_s=proof_s, cache=cache, ahead=ahead)


def _all(candidate: Program, plan: Plan) -> list[Tape]:
    """The tapes of all ranks."""
    from proctor.oracle.prove.recording.world import tape_of

    tapes: list[Tape] = []
    for rank in range(plan.mesh.world):
        tapes.append(tape_of(candidate, rank, plan.mesh.world, tapes))
    return tapes


def assert_proved(reference: Program, candidate: Program, plan: Plan | str, *, proof_s: float = 120.0, equal: bool = False) -> Verdict:
    """For a framework's own tests: fail unless the two functions are proved to be the same.

    Args:
        equal: EQUAL, which is a proof but for a probability, is enough.

    Raises:
        AssertionError: with the whole verdict.
    """
    verdict = prove(reference, candidate, plan, proof_s=proof_s)
    if verdict.verdict != "PROVED" and not (equal and verdict.verdict == "EQUAL"):
        raise AssertionError(str(verdict))
    return verdict


__all__ = ["Culprit", "Plan", "Verdict", "assert_proved", "prove"]
