"""Thousands of ranks: those that run one program on their own parts are run together, and few of them are recorded.

`family.py` finds which axes of the mesh are lanes and what follows from a rank's place; `machine.py` runs all ranks, each family's
operations once, in doubles and in two fields (`domain.py`). So the verdict is of the whole mesh, of its schedule and of all layers, as they are:
EQUAL, which is wrong with the probability that is printed, or DIFFERENT. There is no proof by formulas at this size; by a small program of the same
kind an EQUAL becomes PROVED (`reduced.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove import judge
from proctor.oracle.prove.cache import Cache
from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import Field, P
from proctor.oracle.prove.lanes.domain import Wide, packed, values
from proctor.oracle.prove.lanes.family import Family, Record, Unlike, World, gathered, indices
from proctor.oracle.prove.lanes.locate import Known, Watch
from proctor.oracle.prove.lanes.machine import Integers, LaneMachine, from_floats
from proctor.oracle.prove.lanes.needed import needed
from proctor.oracle.prove.lanes.reduced import Reduced, apart, lesser, lift, show
from proctor.oracle.prove.lanes.routed import routed
from proctor.oracle.prove.lanes.spread import Beside, Forking, Spread, here, uncollected
from proctor.oracle.prove.leaves import Alignment, align, content, keys
from proctor.oracle.prove.machine import Stuck, literal
from proctor.oracle.prove.made_up import relied_on
from proctor.oracle.prove.proofs.sweep import divisors
from proctor.oracle.prove.tape import Array, Tape
from proctor.oracle.prove.verdict import Culprit, Verdict

ATTEMPTS = 3
EVERY = 64  # ranks at most that are all run, where they do not follow from their places
_Outputs = dict[tuple[str, str, int], tuple[bool, float, tuple[int, ...]]]


class _Run(NamedTuple):
    outputs: _Outputs
    opaque: dict[str, str]
    apart: int
    checked: int


def decide(reference: Tape, record: Record, plan: Plan, spread: Spread = here, *, small: Callable[[], Reduced] | None = None, proof_s: float = 120.0, cache: Cache | None = None, ahead: Beside | None = None) -> Verdict:
    """Judge a program on a mesh of any size.

    Args:
        reference: of one rank, with the whole batch.
        record: gives the tapes of the ranks that it is asked for.
        plan: with the mesh.
        spread: where ranks are recorded and fields are judged.
        small: records a smaller program of the same kind, to be proved by formulas where the large one is EQUAL (`reduced.py`).
        proof_s: seconds of CPU that its proof may take; 0 for none.
        cache: of such proofs.
        ahead: what `small` gives, and its proof, if these were begun before (`proving`).

    Raises:
        OracleError: a rank cannot be recorded.
    """
    verdict, began = Verdict("UNPROVED", ranks=plan.mesh.world), time.monotonic()
    try:
        try:
            world = _whole(verdict, reference, gathered(record, plan.mesh, spread), plan, spread, began)
        except Unlike:
            if plan.mesh.world > EVERY:
                raise
            began = time.monotonic()
            world = _whole(verdict, reference, gathered(record, plan.mesh, spread, alike=False), plan, spread, began)
    except Unlike as why:
        verdict.why = f"ranks do not follow from their places on the mesh, and all of them would have to be run: {why}"
    except NotImplementedError as why:
        verdict.why = f"not known for many ranks at once: {why}"
    except Stuck as stuck:
        verdict.verdict, verdict.why = "DIFFERENT", stuck.why
        verdict.culprit = Culprit(stuck.kind, said=str(stuck)[:400])
    else:
        if small is not None and proof_s > 0 and verdict.verdict == "EQUAL":
            lift(verdict, reference, world, lambda: _routed(small()), proof_s, cache, ahead)
    return verdict


@contextmanager
def proving(spread: Spread, small: Callable[[], Reduced] | None, proof_s: float, cache: Cache | None = None) -> Iterator[Beside | None]:
    """Begin to prove a small program beside what follows, for `decide`. None where one thing is done after the other, or on a cluster: it is proved at the end then.

    Args:
        spread: where what follows is done; with several jobs, this is one of them.
        small, proof_s, cache: as of `decide`.
    """
    if small is None or proof_s <= 0 or not isinstance(spread, Forking):
        yield None
        return
    with spread.beside(lambda: show(lambda: _routed(small()), proof_s, cache)) as ahead:
        yield ahead


def _routed(small: Reduced) -> Reduced:
    """A small program with the integers that doubles give, as the large one is judged."""
    world = apart(small)
    if not any(from_floats(node) for tape in small.candidate for node in tape.nodes):
        return small
    alignment = align(small.reference, small.candidate, small.plan)
    if alignment.strange or alignment.merged:
        return small
    at = {(k, held.name): indices(f, alignment.index, held.name, ()) for k, f in enumerate(world.families) for held in f.tape.held if (f.tape.rank, held.name) in alignment.of}
    domain, integers = F64(), Integers()
    try:
        machine = LaneMachine(world, domain, _elements(domain, small.reference, world, at, alignment), integers)
        machine.only = needed(machine)
        machine.run()
    except (Stuck, NotImplementedError) as why:
        raise Unlike(str(why)) from None
    return small._replace(candidate=routed(small.candidate, integers))


def _whole(verdict: Verdict, reference: Tape, world: World, plan: Plan, spread: Spread, began: float) -> World:
    """Judge a world that was run since `began`."""
    verdict.seconds["candidate"] = time.monotonic() - began
    began = time.monotonic()
    try:
        with uncollected():
            _judge(verdict, reference, world, plan, spread)
    finally:
        verdict.seconds["refutation"] = time.monotonic() - began
    return world


def _judge(verdict: Verdict, reference: Tape, world: World, plan: Plan, spread: Spread) -> None:
    verdict.operations = len(reference.nodes) + sum(len(f.tape.nodes) * int(np.prod(world.sizes)) for f in world.families)
    if said := relied_on([tape for f in world.families for _, tape in f.samples]):
        verdict.why = said
        return
    alignment = align(reference, [tape for f in world.families for _, tape in f.samples], plan)
    if alignment.strange:
        verdict.why = f"the ranks do not begin with the reference's parameters: {alignment.strange[0]}"
        return
    if alignment.merged:
        raise Unlike(f"parts of {sorted(alignment.merged)[0]} cannot be told apart: its initial values are equal")
    at = {(k, held.name): indices(f, alignment.index, held.name, world.sizes) for k, f in enumerate(world.families) for held in f.tape.held if (f.tape.rank, held.name) in alignment.of}
    alone = World(Mesh(), (), [()], [Family(reference, [((), reference)])])
    integers: tuple[Integers, Integers] = ({}, {})
    before = judge.starting_values(reference)

    def one(domain: Wide, part: bool = False) -> _Run:
        there = LaneMachine(alone, domain, _elements(domain, reference, alone, {}, alignment), integers[0])
        here = LaneMachine(world, domain, _elements(domain, reference, world, at, alignment), integers[1])
        for machine in (there, here):
            machine.only = needed(machine) if part else None
            machine.run()
        return _Run(_compared(there, here, world, at, alignment, before if domain.name == "f64" else None), {**there.opaque, **here.opaque}, here.apart, here.checked)

    tapes = [reference, *(f.tape for f in world.families)]
    early = one(F64(), part=True) if any(from_floats(node) for tape in tapes for node in tape.nodes) else None  # first: integers come from it
    for again in range(ATTEMPTS):  # two elements of a field may meet by chance
        both = list(spread([functools.partial(one, Field(seed + 100 * again)) for seed in judge.SEEDS]))
        if both[0].outputs == both[1].outputs:
            break
    agree = all(equal for run in both for equal, _, _ in run.outputs.values())
    doubles = both[0] if agree else one(F64())  # where nothing is refuted, they would only say the same once more
    runs = [doubles, *both]
    if early is not None and early.apart:
        verdict.assumed.append(f"integers that are computed from floats are those that doubles give ({early.apart} of {early.checked} are others where ranks were run: a fake process group carries no floats)")
    opaque = {k: v for run in runs for k, v in run.opaque.items()}
    verdict.opaque = [f"{op} at {place}" for op, place in opaque.items()]
    verdict.outputs = len(doubles.outputs)
    ran = world.ran()
    axes = ", ".join(plan.mesh.axes[k] for k in world.lanes) or "none"
    verdict.assumed[:0] = ["real numbers for floats, these shapes, and data that lead to the same integers (routing, masks, order)"]
    if len(ran) < plan.mesh.world:
        verdict.assumed.append(f"ranks that were not run do what ranks {', '.join(map(str, ran[:12]))}{' …' if len(ran) > 12 else ''} ({len(ran)} of {plan.mesh.world}) do, with the parts that follow from their places along {axes}")
    verdict.assumed += sorted({note for f in world.families for note in f.tape.notes} | set(reference.notes))
    wrong = _words(verdict, [run.outputs for run in runs], world, _not_covered(reference, at, alignment, world))
    if wrong:
        known, domain = Known(), Field(judge.SEEDS[0])
        there = LaneMachine(alone, domain, _elements(domain, reference, alone, {}, alignment), integers[0], known.seen)
        there.run()
        parameters = _elements(domain, reference, world, at, alignment)
        known.done([values(v, len(world.lanes)) for v in parameters.values()])
        sizes = {*world.sizes, *(n for f in world.families for n in divisors(f.tape)), int(np.prod(world.sizes))}
        watch = Watch(known, world, sorted({*sizes, *(a * b for a in sizes for b in sizes)} - {0, 1}))
        here = LaneMachine(world, domain, parameters, integers[1], watch.seen)
        here.run()
        verdict.culprit = watch.culprit(wrong, here.marks)


def _words(verdict: Verdict, runs: Sequence[_Outputs], world: World, missing: list[str]) -> list[tuple[str, str, int]]:
    """The verdict; which outputs are wrong."""
    apart = [key for key, (equal, _, _) in runs[0].items() if not equal]
    unequal = [key for key in runs[0] if not all(run[key][0] for run in runs[1:])]
    wrong = [key for key in apart if key in unequal]
    if not runs[0]:
        verdict.why = "no output of the candidate has a counterpart in the reference"
    elif verdict.opaque:
        verdict.why = f"{len(verdict.opaque)} operators have no meaning here"
    elif wrong or missing:
        verdict.verdict = "DIFFERENT"
        named = [f"{what} {name} of rank {_rank(world, which, runs[0][what, name, which][2])}" for what, name, which in wrong]
        verdict.wrong = named + [f"{name} is on no rank as a whole" for name in missing]
        verdict.why = f"{len(wrong)} of {verdict.outputs} outputs differ: {verdict.wrong[0]}"
        verdict.culprit = Culprit("missing part", said=verdict.wrong[0], parameter=missing[0]) if missing else None
    elif apart:
        verdict.why = f"{apart[0][0]} {apart[0][1]} differs in doubles and is equal in the field: it may be chaotic, or a meaning is wrong"
    elif unequal:
        verdict.verdict, verdict.why = "CLOSE", f"{len(unequal)} of {verdict.outputs} outputs are equal in double precision but not as formulas ({unequal[0][0]} {unequal[0][1]})"
    else:
        verdict.verdict, verdict.probability = "EQUAL", (judge.DEGREE / P) ** len(judge.SEEDS)
        verdict.why = f"all {verdict.outputs} outputs, each on all ranks that have it, are equal as formulas at random points of a finite field (wrong with a probability of at most {verdict.probability:.0e})"
    return wrong if verdict.verdict == "DIFFERENT" else []


def _rank(world: World, which: int, lane: tuple[int, ...]) -> int:
    at = dict(zip(world.lanes, lane))
    place = iter(world.places[which])
    return int(np.ravel_multi_index([at[k] if k in at else next(place) for k in range(len(world.mesh.sizes))], world.mesh.sizes))


def _elements(domain: Domain, reference: Tape, world: World, at: Mapping[tuple[int, str], Array], alignment: Alignment) -> dict[tuple[int, int], Array]:
    """What each family's parameters are, on all lanes."""
    found: dict[tuple[int, int], Array] = {}
    axes = len(world.lanes)
    for which, family in enumerate(world.families):
        tape = family.tape
        blocks = {leaf.storage: tape.blocks[leaf.block] for leaf in tape.leaves if leaf.kind == "f"}
        for held in tape.held:
            w = held.window
            if w.storage not in blocks:
                continue
            name = alignment.of[tape.rank, held.name] if axes or world.mesh.sizes else held.name
            one = next(h for h in reference.held if h.name == name)
            there = keys(reference, one, name in alignment.merged) if domain.name != "f64" else content(reference, one.window)
            assert there is not None
            index = at.get((which, held.name), np.arange(there.size).reshape((-1,) + (1,) * axes))
            given: Any = there[index]
            elements = packed(given if domain.name == "f64" else domain.symbol(given.reshape(-1)).reshape(given.shape), axes)
            if type(w) is not type(one.window) or w.numel != blocks[w.storage].size or w.offset:
                found[tape.rank, w.storage] = _within(domain, found.get((tape.rank, w.storage)), blocks[w.storage], w, elements, axes)
            else:
                order = np.argsort(_positions(w), kind="stable")
                found[tape.rank, w.storage] = elements[order]
    return found


def _positions(w: Any) -> Array:
    grid = np.zeros(w.size, np.int64) + w.offset
    for dim, (n, s) in enumerate(zip(w.size, w.stride)):
        grid = grid + (np.arange(n) * s).reshape((-1,) + (1,) * (len(w.size) - dim - 1))
    flat: Array = grid.reshape(-1)
    return flat


def _within(domain: Domain, made: Array | None, block: Array, w: Any, elements: Array, axes: int) -> Array:
    """A parameter that is a part of a larger storage, such as a flat buffer."""
    if getattr(w, "steps", ()):
        raise NotImplementedError("parameters that lie elsewhere in their storage on each rank")
    base = values(literal(domain, block) if made is None else made, axes)
    given = values(elements, axes)
    lanes = np.broadcast_shapes(base.shape[1:], given.shape[1:])
    whole = np.broadcast_to(base, (base.shape[0], *lanes)).copy()
    whole[_positions(w)] = given
    return packed(whole, axes)


def _compared(there: LaneMachine, here: LaneMachine, world: World, at: Mapping[tuple[int, str], Array], alignment: Alignment, before: Mapping[str, Array] | None) -> _Outputs:
    """Of every output: whether it is the reference's on all lanes, how far off it is, and where most; `before` in doubles."""
    found: _Outputs = {}
    pairs = list(_pairs(there, here, world, at, alignment))
    if before is None:
        return {(what, own, which): (not (mine != right).any(), 0.0, ()) for what, own, which, _, mine, right in pairs}
    sizes = {(own, which): max(float(np.abs(a).max(initial=0.0)) for a in (mine, right)) for what, own, which, _, mine, right in pairs if what == "grad"}
    largest = max((size for size in sizes.values() if np.isfinite(size)), default=0.0)
    moves = {(own, which): float(np.abs(right - before[name].reshape(-1)[at[which, own]]).max(initial=0.0)) for what, own, which, name, _, right in pairs if what == "after" and name in before}
    for what, own, which, _, mine, right in pairs:
        size = moves[own, which] if what == "after" and (own, which) in moves else float(np.abs(right).max(initial=0.0))
        off = np.nan_to_num(np.abs(mine - right), nan=np.inf)
        most = float(off.max(initial=0.0))
        worst = np.unravel_index(int(off.argmax()), off.shape)[1:] if off.size else ()
        near = most / (size or 1.0) <= (judge.MOVED if what == "after" else judge.RELATIVE)
        if sizes.get((own, which), np.inf) <= judge.ROUNDING * largest:  # both gradients are rounding, as `judge` says
            near = what == "grad" or most <= judge.MOVED * max(moves.values(), default=0.0)
        found[what, own, which] = near, most / (size or 1.0), tuple(int(x) for x in worst)
    return found


def _pairs(there: LaneMachine, here: LaneMachine, world: World, at: Mapping[tuple[int, str], Array], alignment: Alignment) -> Iterator[tuple[str, str, int, str, Array, Array]]:
    """(what, own name, family, name, the family's elements, the reference's) of every output that both have."""
    for which, marks in enumerate(here.marks):
        for mark, value in marks.items():
            what, _, own = mark.partition(" ")
            name, index = alignment.of.get((world.families[which].tape.rank, own)), at.get((which, own))
            whole = there.marks[0].get(f"{what} {name}")
            if name is not None and index is not None and whole is not None and index.shape[0] == value.size:
                yield what, own, which, name, values(value.reshape(-1), len(world.lanes)), whole.reshape(-1)[index]


def _not_covered(reference: Tape, at: Mapping[tuple[int, str], Array], alignment: Alignment, world: World) -> list[str]:
    parts: dict[str, list[Array]] = {}
    for (which, own), index in at.items():
        parts.setdefault(alignment.of[world.families[which].tape.rank, own], []).append(np.unique(index))
    sizes = {held.name: held.window.numel for held in reference.held}
    marked = [node.detail[6:] for node in reference.nodes if node.detail.startswith("after ")]
    return [name for name in marked if name in sizes and len(np.unique(np.concatenate(parts.get(name, [np.zeros(0, np.int64)])))) < sizes[name]]


__all__ = ["Reduced", "decide", "lesser", "proving"]
