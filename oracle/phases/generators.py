"""Ranks that hold different parts of one module and draw the same numbers for them: their masks are one mask, again and again.

A mask is known of a dropout that is a module (`dropouts.py`). What is drawn elsewhere, in fused attention or by a function, tells by
the state of the generator. It must not be alike on ranks that get the same inputs, hold different parts of the module's parameters and
drop from parts of the tensor that the reference drops from, cut along another dimension than the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from proctor.oracle.judging.verdicts import TensorVerdict
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.reference import Reference
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Draw

Say = Callable[[int, str, Sequence[int], str], TensorVerdict]


def same_numbers(reference: Reference, assembler: Assembler, named: Callable[[int, str], str], say: Say) -> Iterator[TensorVerdict]:
    """What is wrong.

    Args:
        reference: draws for the whole.
        assembler: of the candidate.
        named: canonical path of a rank's module.
        say: makes a verdict of step, module, ranks and a note.
    """
    whole: dict[tuple[int, str, str], tuple[int, ...]] = {}
    for record in reference.ranks.values():
        for d in record.info.draws:
            if d.shape and not d.recompute:
                whole.setdefault((d.step, d.module, d.slot), d.shape)
    drawn: dict[tuple[int, str, str, int, str], dict[int, Draw]] = {}
    for rank, record in assembler.ranks.items():
        for d in record.info.draws:
            module = named(rank, d.module)
            if d.begins and d.p > 0 and not d.recompute and _features(d.shape, whole.get((d.step, module, d.slot), ())):
                drawn.setdefault((d.step, module, d.slot, d.call, d.begins), {})[rank] = d
    said: set[tuple[int, str]] = set()
    for (step, module, _, call, _), held in drawn.items():
        ranks = sorted(held)
        if len(ranks) < 2 or (step, module) in said:
            continue
        parts, inputs = _parts(assembler, module), {r: _first_inputs(assembler.ranks[r], step, call) for r in ranks}
        for i, rank in enumerate(ranks):
            twins = [r for r in ranks[i + 1 :] if inputs[r] and inputs[r] == inputs[rank] and parts.get(r) != parts.get(rank)]
            if twins:
                said.add((step, module))
                wrong = [rank, *twins]
                note = f"{rank_text(wrong)} hold different parts of it and draw the same numbers to drop elements of them: their generators are alike"
                yield say(step, module, wrong, note)
                break


def _features(mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether a tensor is a part of another, cut along other dimensions than the first."""
    if len(mine) != len(theirs) or not mine:
        return False
    return mine[0] == theirs[0] and any(a < b for a, b in zip(mine, theirs)) and all(a <= b for a, b in zip(mine, theirs))


def _parts(assembler: Assembler, module: str) -> Mapping[int, tuple[object, ...]]:
    """By rank which parts of the parameters of a module it holds, as far as that is known."""
    out: dict[int, list[object]] = {}
    inside = f"{module}." if module else ""
    for key in assembler.pieces:
        if key[2] == "param" and key[0] == 0 and key[3].startswith(inside):
            for piece in assembler.placed(key):
                if piece.places is not None and piece.firm:
                    out.setdefault(piece.rank, []).append((key[3], tuple(p.tobytes() for p in piece.places)))
    return {rank: tuple(found) for rank, found in out.items()}


def _first_inputs(record: RankRecord, step: int, call: int) -> tuple[bytes, ...]:
    """What went into the first module that ran in a call: ranks that get other rows hold other ones rightly."""
    mine = [e for e in record.entries if e.step == step and e.kind == "input" and not e.recompute]
    first = min(mine, key=lambda e: e.order, default=None)
    if first is None:
        return ()
    return tuple(record.array(e).tobytes() for e in mine if e.name == first.name and e.call == call)
