"""The optimizer alone: given the reference's gradients, does the candidate make the reference's update?

End to end an update shows little: Adam divides by the gradient's size, so rounding of small gradients turns the sign of
whole updates (correct runs in bfloat16 differ by 14 to 56 %; findings, §3). `localise` therefore gives the candidate's
optimizer the reference's gradients. Parameters and moments after that step differ by the rounding of one update only,
and a learning rate that is one percent off, a lost weight decay or a skipped shard of ZeRO stand out.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import TensorVerdict, Verdict, failing, flow, judge
from proctor.oracle.merging.locate import take
from proctor.oracle.merging.reference import Key
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.numbers.tolerance import SMALLEST, Tolerance, unit_roundoff
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.tensors import MASTER

Array = npt.NDArray[Any]

UPDATES: Final = ("opt_state", "param_after")
# 1 - 0.999 in float32 is off by 1.3e-5, so optimizers that keep their factors in float32 and those that keep them in
# double differ by that, in a moment and in an update.
FACTORS: Final = 2.0**-14
ROUNDINGS: Final = 4.0  # of a parameter in one update, at most: decay and step, each done in another order


def isolate_updates(comparison: Comparison, found: Verdict) -> Verdict:
    """Judge parameters and moments by the rounding of one update.

    Args:
        comparison: after its `run`, of a candidate whose optimizers were given the reference's gradients.
        found: what `run` returned.

    Returns:
        the verdict with other entries for what optimizers leave; where a gradient could not be given, with those it had.
    """
    if not found.tensors:
        return found
    alone = {(t.step, t.call, t.kind, t.name, t.slot): t for key in comparison.reference.order if (t := _judge(comparison, key)) is not None}
    tensors = tuple(sorted((alone.get((t.step, t.call, t.kind, t.name, t.slot), t) for t in found.tensors), key=flow))
    return msgspec.structs.replace(found, tensors=tensors)


def _judge(comparison: Comparison, key: Key) -> TensorVerdict | None:
    """One tensor that an optimizer left; `None` where its gradient was not the reference's."""
    step, call, kind, name, slot = key
    reference, assembler = comparison.reference, comparison.assembler
    target = reference.entries[key]
    if kind not in UPDATES or not is_floating(target.dtype) or not _given(comparison, step, name):
        return None
    merged = assembler.merge(key)
    if merged is None or merged.full is None:
        return None
    theirs = reference.array(target)
    before = _before(comparison, step, name)
    ranks = sorted({p.rank for p in merged.pieces})
    sums = compare(merged.full, theirs, target.dtype)
    if merged.conflicts:  # replicas that differ: each rank for itself
        parts = [(compare(assembler.values(p), _part(theirs, p.places), p.entry.dtype), p.rank)
                 for p in merged.pieces if p.places is not None and p.entry.dtype == target.dtype]  # fmt: skip
        wide = math.inf
        if parts:
            wide = max(parts, key=lambda part: part[0].error)[0].error
        allowed = _allowed(comparison, key, sums, theirs, before)
        ranks = sorted({rank for d, rank in parts if d.error > allowed.absolute or d.mismatch}) or ranks
        if wide > sums.error and parts:
            sums = max((d for d, _ in parts), key=lambda d: d.error)
    allowed = _allowed(comparison, key, sums, theirs, before)
    piece = merged.pieces[0]
    verdict = judge(
        sums, allowed, step=step, call=call, kind=kind, name=name, slot=slot, cls=target.cls, source=piece.entry.source or target.source,
        ranks=ranks, layout=piece.label, order=float(target.order),
    )  # fmt: skip
    if failing(verdict) and kind == "param_after" and before is not None and not merged.conflicts:
        verdict = msgspec.structs.replace(verdict, note=_factor(merged.full, theirs, before, target.dtype))
    if failing(verdict) and merged.conflicts:
        verdict = msgspec.structs.replace(verdict, note=f"on {rank_text(ranks)}")
    return verdict


def _given(comparison: Comparison, step: int, name: str) -> bool:
    """Whether all that takes part in an update had the reference's gradient, exactly."""
    target = comparison.reference.entries.get((step, 0, "main_grad", name, ""))
    mine = comparison.assembler.pieces.get((step, 0, "main_grad", name, ""), [])
    homes = {rank for rank, _ in comparison.assembler.pieces.get((0, 0, "param", name, ""), [])}
    return target is not None and bool(mine) and all(e.dtype == target.dtype and rank in homes for rank, e in mine)


def _before(comparison: Comparison, step: int, name: str) -> Array | None:
    """The reference's parameter before a step."""
    key = (0, 0, "param", name, "") if step == 0 else (step - 1, 0, "param_after", name, "")
    entry = comparison.reference.entries.get(key)
    return as_float(comparison.reference.array(entry), entry.dtype) if entry is not None else None


def _allowed(comparison: Comparison, key: Key, sums: Difference, theirs: Array, before: Array | None) -> Tolerance:
    """What rounding may do to one update."""
    target = comparison.reference.entries[key]
    u = unit_roundoff(target.dtype)
    smallest = SMALLEST.get(target.dtype, 2.0**-126) * math.sqrt(max(sums.n, 1))
    states = [e.dtype for k, e in comparison.reference.entries.items() if k[0] == key[0] and k[2] == "opt_state" and k[3] == key[3]]
    compute = max((unit_roundoff(d) for d in states), default=u)
    if key[2] == "opt_state" and key[4] != MASTER:
        return Tolerance(max(FACTORS, ROUNDINGS * u) * sums.size + smallest, sums.size, "rounding")
    if before is None or before.shape != theirs.shape:
        return Tolerance(math.inf, sums.size, "unstable")
    update = float(np.linalg.norm((as_float(theirs, target.dtype).astype(np.float64) - before).ravel()))
    start = _start_error(comparison, key[3]) if key[0] == 0 else 0.0
    return Tolerance(ROUNDINGS * u * sums.size + max(FACTORS, ROUNDINGS * compute) * update + start + smallest, update, "rounding")


def _start_error(comparison: Comparison, name: str) -> float:
    """How far the two sides were apart before the first step; 0 for healthy runs."""
    key = (0, 0, "param", name, "")
    target, merged = comparison.reference.entries.get(key), comparison.assembler.merge(key)
    if target is None or merged is None or merged.full is None:
        return math.inf
    return compare(merged.full, comparison.reference.array(target), target.dtype).error


def _factor(mine: Array, theirs: Array, before: Array, dtype: str) -> str:
    """By how much the update is too large, where it is the reference's but for a factor."""
    a, b = (as_float(x, dtype).astype(np.float64).ravel() - before.ravel() for x in (mine, theirs))
    square = float(b @ b)
    if not square or not np.isfinite(a).all():
        return ""
    alpha = float(a @ b) / square
    if not float(np.linalg.norm(a)):
        return "it was not updated"
    off = float(np.linalg.norm(a - alpha * b)) / math.sqrt(square)
    return f"the update is {alpha:.4g} times the reference's" if off < 0.1 * abs(alpha - 1.0) else f"the update is off by {float(np.linalg.norm(a - b)) / math.sqrt(square):.2g} of itself"


def _part(values: Array, places: Any) -> Array:
    return np.ascontiguousarray(take(values, places))
