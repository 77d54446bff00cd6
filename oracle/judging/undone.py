"""What cannot be held against the reference by itself, and decides nothing: gradients that are averaged later, and those of other rows.

A program may update each rank by its own gradient and average parameters instead; for an update that is linear in the gradient that is the same
mathematics, and the parameters after it say so. And where a module is called less often than in the reference, on more rows at a time, a gradient without
rows (of positions) is a sum over other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict
from proctor.oracle.merging.assemble import GRADIENTS
from proctor.oracle.merging.reference import Key

OWN: Final = "each rank updates by its own; the parameters are right after it"
_RIGHT: Final = frozenset({"ok", "warn"})


def averaged_later(tensors: Sequence[TensorVerdict], replicas: Sequence[ReplicaConflict], alike: Callable[[int, str], bool]) -> tuple[list[TensorVerdict], list[ReplicaConflict], list[str]]:
    """Gradients of ranks of which the mean, or the sum, is the reference's, and whose parameters are the reference's after the update, on every rank.

    Args:
        tensors, replicas: of the whole comparison.
        alike: whether all ranks hold the same bits of a parameter after a step.

    Returns:
        both, without these gradients among what is wrong, and what is to be said.
    """
    apart = {(r.step, r.name) for r in replicas if r.kind in ("param", "param_after", "main_grad")}
    after_apart = {(r.step, r.name) for r in replicas if r.kind in ("param", "param_after")}
    after = {(t.step, t.name): t.verdict in _RIGHT for t in tensors if t.kind == "param_after"}
    undone = {
        (t.step, t.name)
        for t in tensors
        if t.kind == "main_grad" and t.note.startswith("partial ") and (t.step, t.name) in apart and (t.step, t.name) not in after_apart and after.get((t.step, t.name)) and alike(t.step, t.name)
    }
    if not undone:
        return list(tensors), list(replicas), []
    kept = [
        msgspec.structs.replace(t, verdict="no-power", note=OWN) if t.kind == "main_grad" and (t.step, t.name) in undone else t
        for t in tensors
    ]
    names = sorted({name for _, name in undone})
    said = f"gradients of {len(names)} parameters ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}): ranks update by their own, and the parameters after it are averaged; these are right"
    return kept, [r for r in replicas if not (r.kind == "main_grad" and (r.step, r.name) in undone)], [said]


def of_other_rows(pieces: Mapping[Key, object], calls: Mapping[str, int]) -> set[Key]:
    """Gradients that cross modules that the candidate calls less often than the reference.

    Args:
        pieces: of the candidate, by tensor of the reference.
        calls: of the reference's modules, in its first step.
    """
    ran: dict[str, set[int]] = {}
    for step, call, kind, name, _ in pieces:
        if step == 0 and kind == "output":
            ran.setdefault(name, set()).add(call)
    fewer = {name for name, found in ran.items() if 0 < len(found) < calls.get(name, 0)}
    return {key for key in pieces if key[2] in GRADIENTS and key[3] in fewer}
