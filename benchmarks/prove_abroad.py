"""Programs of other people's repositories: what is said of them as they are, and of each with a mistake planted?

    python benchmarks/prove_abroad.py CHECKOUTS [--only NAME …] [--proof S] [--mistakes N] [--out FILE]

CHECKOUTS: a folder with a checkout `owner+name` of each repository that a program is from. None of them may be DIFFERENT as it is. Mistakes are
planted into the recorded steps of ranks (`prove_mutants.py`): a collective dropped, doubled, on a wrong group, with another reduction; a factor;
a slice. One that doubles see must be DIFFERENT; its place is right where the culprit is the module, the line or an operation next to it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import prove_abroad_programs as programs
from benchmarks import prove_mutants as mutants
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.tape import MARK, Tape
from proctor.oracle.prove.verdict import Culprit


def recorded(one: programs.Program) -> tuple[Tape, list[Tape]]:
    """The reference's step and those of all ranks."""
    with contextlib.redirect_stdout(io.StringIO()):
        reference = tape_of(one.alone)
        ranks: list[Tape] = []
        world = Plan(one.mesh).mesh.world
        for rank in range(world):
            ranks.append(tape_of(one.parallel, rank, world, ranks))
    return reference, ranks


def healthy(one: programs.Program, proof_s: float) -> tuple[dict[str, Any], tuple[Tape, list[Tape]] | None]:
    """A row of the table, and what was recorded."""
    began = time.process_time()
    try:
        reference, ranks = recorded(one)
    except Exception as error:  # noqa: BLE001 - it is a program that nobody has run here
        traceback.print_exc(limit=-4)
        return {"program": one.name, "verdict": "cannot be run", "why": f"{type(error).__name__}: {str(error)[:300]}"}, None
    verdict = decide(reference, ranks, Plan(one.mesh), proof_s=proof_s)
    row = {
        "program": one.name, "by": one.by, "mesh": one.mesh, "verdict": verdict.verdict, "why": verdict.why, "where": verdict.culprit.said if verdict.culprit else "",
        "opaque": verdict.opaque, "outputs": verdict.outputs, "operations": verdict.operations, "cpu_s": round(time.process_time() - began, 1),
    }
    return row, (reference, ranks)


def planted(one: programs.Program, tapes: tuple[Tape, list[Tape]], number: int) -> dict[str, Any]:
    """A row of a mistake."""
    dice = random.Random(f"{one.name} {number}")
    ranks = [mutants.apart(tape) for tape in tapes[1]]
    kind = ("drop", "double", "regroup", "reduction", "factor", "slices")[number % 6]
    try:
        place = planted_at(ranks, getattr(mutants, kind), dice)
    except (IndexError, ValueError):
        return {"program": one.name, "mistake": kind, "verdict": "cannot be planted"}
    began = time.process_time()
    verdict = decide(tapes[0], ranks, Plan(one.mesh), proof_s=0.0)
    near = seen_by_doubles(tapes[0], ranks)
    culprit = verdict.culprit
    right = culprit is not None and _right(culprit, place, {n.place for tape in ranks for n in tape.nodes if n.phase == "backward" and not n.module})
    return {
        "program": one.name, "mistake": kind, "verdict": verdict.verdict, "seen": not near, "right": right, "said": culprit.said if culprit else verdict.why, "planted": [sorted(place[0])[:6], sorted(place[1])[:6], sorted(place[2])[:2]],
        "cpu_s": round(time.process_time() - began, 2),
    }


def _right(culprit: Culprit, planted: tuple[set[str], set[str], set[tuple[str, str]]], calls: set[str]) -> bool:
    """Whether a culprit is what was planted; `calls`: lines that call backward, which are no place by themselves: the operation has to be right as well."""
    modules, places, operators = planted
    if culprit.parameter in modules or _inside(culprit.module, modules):
        return True
    if culprit.place and culprit.place not in calls:
        return culprit.place in places
    return (culprit.op, culprit.phase) in operators


def _inside(module: str, planted: set[str]) -> bool:
    return bool(module) and any(m and (m.startswith(module) or module.startswith(m)) for m in planted)


def planted_at(ranks: list[Tape], mutate: Any, dice: random.Random) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    """Modules and parameters, lines, and operators of what was changed, and of what reads it next."""
    before = [[(n.op, repr(n.args), n.ranks, n.detail, repr(n.ins)) for n in tape.nodes] for tape in ranks]
    mutate(ranks, dice)
    modules: set[str] = set()
    places: set[str] = set()
    ops: set[tuple[str, str]] = set()
    for tape, was in zip(ranks, before):
        now = [(n.op, repr(n.args), n.ranks, n.detail, repr(n.ins)) for n in tape.nodes]
        at = next((k for k, (a, b) in enumerate(zip(now, was)) if a != b), None)
        if at is None:
            continue
        storages = {w.storage for w in (*tape.nodes[at].ins, *tape.nodes[at].outs) if w is not None}
        near = [tape.nodes[at]]
        for node in tape.nodes[at + 1 :]:
            if any(w.storage in storages for w in node.ins):
                near.append(node)
                if len(near) > 6:
                    break
        before_it = [n for n in tape.nodes[:at] if any(w is not None and w.storage in storages for w in n.outs)]
        near += before_it[-4:]
        modules |= {n.module for n in near}
        places |= {n.place for n in near if n.place}
        ops |= {(n.op, n.phase) for n in (near[0], *before_it[-2:])}
        modules |= {n.detail.partition(" ")[2] for n in near if n.op == MARK}
    return modules, places - {""}, ops


def seen_by_doubles(reference: Tape, ranks: list[Tape]) -> bool:
    """Whether all outputs are near in doubles."""
    from proctor.oracle.prove import judge
    from proctor.oracle.prove.domains.f64 import F64
    from proctor.oracle.prove.leaves import align
    from proctor.oracle.prove.machine import Stuck

    alignment = align(reference, ranks)
    try:
        runs = judge.Runs.of(F64(), reference, ranks, alignment)
    except (Stuck, NotImplementedError):
        return False
    return all(o.doubles for o in judge.compared_doubles(runs, alignment, judge.starting_values(reference)))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--proof", type=float, default=60.0, metavar="S")
    parser.add_argument("--mistakes", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    programs.ROOT.append(args.checkouts)
    for name, one in programs.everything().items():
        if args.only and not any(part in name for part in args.only):
            continue
        row, tapes = healthy(one, args.proof)
        rows = [row]
        if tapes is not None and row["verdict"] in ("PROVED", "EQUAL", "CLOSE"):
            rows += [planted(one, tapes, number) for number in range(args.mistakes)]
        for found in rows:
            print(json.dumps(found), flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
