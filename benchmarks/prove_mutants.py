"""Mistakes planted into recorded graphs: is one that double precision sees ever called equal by the field or by the proof?

    python benchmarks/prove_mutants.py [--count 1000] [--proofs 50] [--seed 0] [--out FILE]

Programs: a network cut by hand over 2, 3 and 6 ranks (tensor parallel) and 2 and 3 ranks (data parallel) with AdamW or SGD and clipping.
A mutant drops, doubles, re-groups or re-orders a collective, changes its reduction, a factor, which slice is read, or takes another layer's
parameter. Each is run in this process, on the recorded tapes, in doubles and in one field, apart from each other; of some the proof is tried as well. Printed: how often doubles and field agree, and
the two counts that must be 0. With `--out` it goes on where the file ends.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from proctor.oracle.prove import judge
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import Field
from proctor.oracle.prove.judge import Runs
from proctor.oracle.prove.leaves import Alignment, align, elements
from proctor.oracle.prove.locate import Observed
from proctor.oracle.prove.machine import Machine, Stuck
from proctor.oracle.prove.proofs import attempt
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.tape import Tape, Window, collective

Mutate = Callable[[list[Tape], random.Random], str]
_PROOF_S = 3.0  # of CPU: a proof of a correct program takes less than one
_PROGRAMS: list[tuple[str, Tape, list[Tape]]] = []


def _collectives(tapes: Sequence[Tape], dice: random.Random) -> list[tuple[Tape, int]]:
    """One collective, on all of its ranks."""
    turns = [k for k, node in enumerate(tapes[0].nodes) if collective(node.op)]
    turn = dice.randrange(len(turns))
    return [(tape, [k for k, node in enumerate(tape.nodes) if collective(node.op)][turn]) for tape in tapes]


def drop(tapes: list[Tape], dice: random.Random) -> str:
    for tape, at in _collectives(tapes, dice):
        tape.nodes[at].op, tape.nodes[at].ins, tape.nodes[at].outs, tape.nodes[at].detail = "proctor.mark", tape.nodes[at].ins[:1], [], "dropped"
    return "drop"


def double(tapes: list[Tape], dice: random.Random) -> str:
    for tape, at in _collectives(tapes, dice):
        copied = tape.nodes[at]
        tape.nodes[at + 1 : at + 1] = [copied]
        _shift_reads(tape, at)
    return "double"


def _shift_reads(tape: Tape, at: int) -> None:
    """Numbers that were read are called by their node, which has moved."""
    for node in tape.nodes:
        node.args = [{**value, "r": value["r"] + 1} if isinstance(value, dict) and value.get("r", -1) > at else value for value in node.args]


def regroup(tapes: list[Tape], dice: random.Random) -> str:
    for tape, at in _collectives(tapes, dice):
        ranks = tape.nodes[at].ranks
        half = max(1, len(ranks) // 2)
        tape.nodes[at].ranks = ranks[:half] if tape.rank in ranks[:half] else ranks[half:]
    return "regroup"


def reduction(tapes: list[Tape], dice: random.Random) -> str:
    other = dice.choice(["avg", "max", "min", "product"])
    for tape, at in _collectives(tapes, dice):
        tape.nodes[at].detail = other
    return "reduction"


def reorder(tapes: list[Tape], dice: random.Random) -> str:
    far = dice.randint(1, 6)
    for tape, at in _collectives(tapes, dice):
        node = tape.nodes.pop(at)
        tape.nodes.insert(min(len(tape.nodes), at + far), node)
    return "reorder"


def factor(tapes: list[Tape], dice: random.Random) -> str:
    ranks = tapes if dice.random() < 0.5 else [dice.choice(tapes)]
    places = [(k, a) for k, node in enumerate(ranks[0].nodes) for a, value in enumerate(node.args) if isinstance(value, float) and node.op.startswith("aten.")]
    at, argument = dice.choice(places)
    by = dice.choice([0.5, 2.0, 1.01])
    for tape in ranks:
        if at < len(tape.nodes) and argument < len(tape.nodes[at].args) and isinstance(tape.nodes[at].args[argument], float):
            tape.nodes[at].args[argument] *= by
    return "factor"


def slices(tapes: list[Tape], dice: random.Random) -> str:
    tape = dice.choice(tapes)
    places = [(k, i) for k, node in enumerate(tape.nodes) for i, w in enumerate(node.ins) if w.kind == "f" and w.size and w.size[0] > 1 and node.op.startswith("aten.") and node.phase != "update"]
    at, which = dice.choice(places)
    w = tape.nodes[at].ins[which]
    tape.nodes[at].ins[which] = Window(w.storage, w.offset + (w.size[0] - 1) * w.stride[0], w.size, (-w.stride[0], *w.stride[1:]), w.kind)  # backwards
    return "slice"


def layer(tapes: list[Tape], dice: random.Random) -> str:
    tape = dice.choice(tapes)
    pairs = [(a.window, b.window) for a in tape.held for b in tape.held if a.window.size == b.window.size and a.name != b.name]
    one, other = dice.choice(pairs)
    places = [(k, i) for k, node in enumerate(tape.nodes) for i, w in enumerate(node.ins) if w.storage == one.storage and node.phase != "update" and node.op.startswith("aten.")]
    at, which = dice.choice(places)
    w = tape.nodes[at].ins[which]
    tape.nodes[at].ins[which] = Window(other.storage, w.offset, w.size, w.stride, w.kind)
    return "layer"


MUTATIONS: tuple[Mutate, ...] = (drop, double, regroup, reduction, reorder, factor, slices, layer)


def apart(tape: Tape) -> Tape:
    """A tape whose nodes can be changed without changing the other's; numbers are shared."""
    nodes = [structs.replace(node, args=list(node.args), ins=list(node.ins), outs=list(node.outs)) for node in tape.nodes]
    return structs.replace(tape, nodes=nodes)


def programs() -> list[tuple[str, Tape, list[Tape]]]:
    """Name, reference, ranks."""
    from helpers.oracle.prove_programs import data_parallel, tensor_parallel

    found = []
    for make, clip, worlds in ((tensor_parallel, {}, (2, 3, 6)), (data_parallel, {"clip": True}, (2, 3))):
        reference = tape_of(make(**clip))
        found += [(f"{make.__name__} over {world}", reference, [tape_of(make(**clip), r, world) for r in range(world)]) for world in worlds]
    return found


@functools.cache
def _alone(number: int, seed: int) -> Machine:
    """The reference of a program, in doubles (seed 0) or in a field."""
    reference = _PROGRAMS[number][1]
    domain = Field(seed) if seed else F64()
    machine = Machine([reference], domain, elements(domain, reference, reference, None))
    machine.run()
    return machine


def _runs(number: int, tapes: Sequence[Tape], alignment: Alignment, seed: int) -> Runs:
    there = _alone(number, seed)
    domain = there.d
    leaves = {key: value for tape in tapes for key, value in elements(domain, tape, _PROGRAMS[number][1], alignment).items()}
    here = Machine(tapes, domain, leaves)
    here.run()
    return Runs(there, here)


def judged(number: int, tapes: list[Tape], proof: bool) -> tuple[str, bool, bool, bool]:
    """("", doubles equal, field equal, proved); the first is why nothing could be run."""
    reference = _PROGRAMS[number][1]
    alignment = align(reference, tapes)
    try:
        near = all(o.doubles for o in judge.compared_doubles(_runs(number, tapes, alignment, 0), alignment, judge.starting_values(reference)))
        equal = all(judge.compared_field(_runs(number, tapes, alignment, 1), alignment).values())
        proved = proof and decided(reference, tapes, alignment)
    except Stuck:
        return "ranks wait", False, False, False
    except (ValueError, IndexError, NotImplementedError) as error:
        return f"cannot run: {type(error).__name__}", False, False, False
    return "", near, equal, proved


def decided(reference: Tape, tapes: list[Tape], alignment: Alignment) -> bool:
    """Whether the proof succeeds, whatever doubles and field say."""
    told, observed = Observed(reference, tapes), []
    Runs.of(F64(), reference, tapes, alignment, (told.reference, told.candidate))
    for seed in judge.SEEDS:
        seen = Observed(reference, tapes)
        seen.keep(Runs.of(Field(seed), reference, tapes, alignment, (seen.reference, seen.candidate)))
        observed.append(seen)
    found = attempt(reference, tapes, alignment, observed, told, budget_s=_PROOF_S)
    return not found.why and not found.open


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--proofs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a line of JSON for each mutant")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.process_time()
    _PROGRAMS.extend(programs())
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    for number in range(len(rows), args.count):
        rows.append(mutant(number, args.seed, number % max(1, args.count // max(1, args.proofs)) == 0))
        if args.out:
            with args.out.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
        if rows[-1]["bad"]:
            print(f"BAD: {rows[-1]}", flush=True)
    table = Counter((row["kind"], row["why"] or ("equal" if row["doubles"] else "different") + " in doubles, " + ("equal" if row["field"] else "different") + " in the field") for row in rows)
    for (kind, said), count in sorted(table.items()):
        print(f"{kind:10s} {said:55s} {count}")
    bad = Counter(row["bad"] for row in rows if row["bad"])
    tried, proved = sum(row["proof"] for row in rows), sum(row["proved"] for row in rows)
    print(f"{len(rows)} mutants, {tried} proofs tried, {proved} proved, {time.process_time() - began:.0f} s of CPU: {dict(bad) or 'none that doubles see is equal in the field or proved'}")


def mutant(number: int, seed: int, proof: bool) -> dict[str, Any]:
    """One of them, by its number."""
    dice = random.Random(seed * 1_000_003 + number)
    which = number % len(_PROGRAMS)
    name, _, ranks = _PROGRAMS[which]
    tapes = [apart(tape) for tape in ranks]
    kind = dice.choice(MUTATIONS)(tapes, dice)
    why, near, equal, proved = judged(which, tapes, proof)
    bad = ""
    if not why and not near:
        bad = "different in doubles, equal in the field" if equal else "different in doubles, proved" if proved else ""
    return {"number": number, "program": name, "kind": kind, "why": why, "doubles": near, "field": equal, "proof": proof, "proved": proved, "bad": bad}


if __name__ == "__main__":
    main()
