"""A large program by a small one of the same kind: the small one is proved by formulas, and the large one is shown to be made of the same pieces.

The large program was judged before, as a whole and at random points (`__init__.py`): nothing here can make it equal, and a mistake in one layer, stage,
microbatch or rank is refuted there. What is added is that equality is no chance of these points: each operation has the surroundings of one in
the small program (`skeleton.py`), and that is proved for all data. That pieces of other sizes, and more of them, are as good as those of the small
program is what remains to be believed; `Verdict.assumed` says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove.cache import Cache
from proctor.oracle.prove.lanes.family import Family, Unlike, World
from proctor.oracle.prove.lanes.skeleton import REACH, Skeleton
from proctor.oracle.prove.lanes.spread import Beside, uncollected
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.tape import Array, Tape
from proctor.oracle.prove.verdict import Verdict


class Reduced(NamedTuple):
    """A small program: its reference, all ranks, and the plan with its mesh."""

    reference: Tape
    candidate: Sequence[Tape]
    plan: Plan


def lesser(mesh: Mesh) -> Mesh:
    """The smallest mesh of the same kind: two ranks along each axis that has several."""
    return Mesh(mesh.axes, tuple(min(n, 2) for n in mesh.sizes))


class Shown(NamedTuple):
    """What a large program takes from a small one.

    Attributes:
        plan: with its mesh.
        colours: surroundings of its operations, each once.
        proved: its verdict; None where that is not known yet.
        seconds: of what took long.
        said: by the cache.
    """

    plan: Plan
    colours: Array
    proved: Verdict | None
    seconds: dict[str, float]
    said: Sequence[str] = ()


def pieces(small: Reduced) -> Array:
    """Surroundings of all operations of a small program.

    Raises:
        Unlike: its groups are not those of a mesh.
    """
    return np.unique(Skeleton(small.reference, apart(small)).colours)


def show(record: Callable[[], Reduced], proof_s: float, cache: Cache | None) -> Shown:
    """All that is to be known of a small program, in a process of its own."""
    began, seconds = time.monotonic(), {}
    with uncollected():
        small = record()
        seconds["small program"], began = time.monotonic() - began, time.monotonic()
        colours = pieces(small)
    proved = decide(small.reference, small.candidate, small.plan, proof_s=proof_s, cache=cache)
    seconds["proof of the small program"] = time.monotonic() - began
    return Shown(small.plan, colours, msgspec.structs.replace(proved, cuts={}, lemmas={}), seconds, cache.said if cache is not None else ())


def lift(verdict: Verdict, reference: Tape, world: World, record: Callable[[], Reduced], proof_s: float, cache: Cache | None = None, ahead: Beside | None = None) -> None:
    """Make an EQUAL of a large program PROVED, or say why it stays EQUAL.

    Args:
        verdict: of the large program; is changed.
        reference, world: the large program.
        record: records a small one of the same kind.
        proof_s: seconds of CPU that the small program's proof may take.
        cache: of proofs; many large programs have the same small one.
        ahead: `show`, which began earlier; where it gives nothing, all is done here.
    """
    began, small = time.monotonic(), None
    try:
        with uncollected():
            skeleton = Skeleton(reference, world)
            verdict.seconds["skeleton"], began = time.monotonic() - began, time.monotonic()
            shown: Shown | None = ahead.found() if ahead is not None else None
            if shown is None:
                began = time.monotonic()
                small = record()
                verdict.seconds["small program"], began = time.monotonic() - began, time.monotonic()
                shown = Shown(small.plan, pieces(small), None, {})
                verdict.seconds["skeleton"] += time.monotonic() - began
            strange = skeleton.strange(shown.colours)
    except (Unlike, OracleError) as why:
        verdict.why += f"; not proved: {str(why).removeprefix('PR-E600').strip()}"
        return
    verdict.seconds.update(shown.seconds)
    if cache is not None:
        cache.said += shown.said
    if strange:
        verdict.why += f"; not proved: the small program has no operation with the surroundings of {strange}"
        return
    proved = shown.proved
    if proved is None:
        assert small is not None
        began = time.monotonic()
        proved = decide(small.reference, small.candidate, small.plan, proof_s=proof_s, cache=cache)
        verdict.seconds["proof of the small program"] = time.monotonic() - began
    if proved.verdict != "PROVED":
        verdict.why += f"; not proved: the small program is {proved.verdict}: {proved.why}"
        return
    verdict.verdict = "PROVED"
    verdict.why = (
        f"the small program ({shown.plan.mesh}) is proved by formulas: {proved.why}; every operation here has the surroundings of one there ({len(shown.colours)} different ones, "
        f"{REACH} operations back); and {verdict.why}"
    )
    verdict.assumed.append(f"sizes, and how many layers, microbatches and ranks there are, do not matter to a formula: those of {shown.plan.mesh} stand for those of {world.mesh}")


def apart(small: Reduced) -> World:
    """All ranks, each a program of its own."""
    mesh: Mesh = small.plan.mesh
    places = list(itertools.product(*(range(n) for n in mesh.sizes)))
    return World(mesh, (), places, [Family(tape, [((), tape)]) for tape in small.candidate])


__all__ = ["Reduced", "Shown", "apart", "lesser", "lift", "show"]
