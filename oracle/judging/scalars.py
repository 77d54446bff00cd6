"""Numbers that a program computes and no tensor shows: the gradient's norm, the factor of clipping, learning rates.

The norm that clipping saw is computed again from the candidate's merged gradients, and what clipping did to them is
compared with what the reference's limit asks for. Nothing is said of a norm that is not `clip_grad_norm_`'s, of a factor
that neither it nor `clip_grads_with_norm_` applies, or where the reference's own numbers do not fit together like that (it
clips parts, or does something else to gradients before they are used). Rates are compared parameter by parameter, since
groups may be cut in another way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import TensorVerdict
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.padding import gradient as padding_norm
from proctor.oracle.merging.reference import Reference
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tolerance import unit_roundoff
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.store import ProcessInfo
from proctor.oracle.tensors import Clip, OptimizerGroup

Array = npt.NDArray[Any]

UPDATES: Final = "updates"  # name of what is said of updates that follow an update
UNCLIPPED: Final = "unclipped"  # slot of a gradient before `clip_grad_norm_`, or `clip_grads_with_norm_`
EXACT: Final = 1e-6  # rates are computed in double, and may be kept in float32
SUMS: Final = 1e-5  # float32 sums of squares, in whatever order
EPSILON: Final = 1e-6  # that clip_grad_norm_ adds to the norm
SAME_MEANING: Final = ("lr",)  # in every optimizer; the other numbers are compared between optimizers of one class


def judge_scalars(reference: Reference, assembler: Assembler) -> list[TensorVerdict]:
    """Verdicts of kind `scalar`, of every step: `grad_norm`, `clip_coefficient`, `lr` and other settings of optimizers, `updates`."""
    out: list[TensorVerdict] = []
    for step in range(reference.recording.info.steps):
        out += _clipping(reference, assembler, step)
        out += _settings(reference, assembler, step)
        out += _again(reference, assembler, step)
    return out


def total_norm(arrays: Iterable[tuple[Array, str]]) -> float:
    """√Σ‖g‖² in double.

    Args:
        arrays: as stored, with torch's name of their type.
    """
    return math.sqrt(math.fsum(float(np.square(as_float(a, dtype).astype(np.float64)).sum()) for a, dtype in arrays))


def coefficient(norm: float, max_norm: float | None) -> float:
    """By what `clip_grad_norm_` multiplies gradients of a norm."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + EPSILON))


def clip_room(reference: Reference, assembler: Assembler, step: int) -> float:
    """By what clipped gradients may differ as a whole: two right norms are float32 sums in another order, and each scales all gradients.

    It is what the norms were seen to differ by, and 0 where that is more than rounding: then clipping is wrong, or follows from what is.
    """
    theirs = _only_clip(record.info for record in reference.ranks.values()).get(step)
    if theirs is None or theirs.norm is None:
        return 0.0
    mine = [c.norm for record in assembler.ranks.values() for c in record.info.clips if c.step == step and c.max_norm == theirs.max_norm and c.norm_type == "2.0"]
    factor = coefficient(theirs.norm, theirs.max_norm)
    off = max((abs(coefficient(n, theirs.max_norm) / factor - 1.0) if n is not None else math.inf for n in mine), default=0.0)
    return off if off <= SUMS else 0.0


# -- clipping -----------------------------------------------------------------------------------------------


def _clipping(reference: Reference, assembler: Assembler, step: int) -> list[TensorVerdict]:
    theirs = _only_clip(record.info for record in reference.ranks.values())
    clip = theirs.get(step)
    if clip is None or clip.norm is None:
        return []
    names = [k[3] for k in reference.order if k[0] == step and k[2] == "main_grad" and k[4] == UNCLIPPED]
    used = [n for n in names if (step, 0, "main_grad", n, "") in reference.entries]
    if not names or used != names or len(names) != len(clip.params):
        return []
    if any(reference.entries[step, 0, "main_grad", n, UNCLIPPED].tile for n in names):
        return []  # sums over tiles have a norm of their own
    before = total_norm(_values(reference, step, names, UNCLIPPED))
    after = total_norm(_values(reference, step, names, ""))
    room = max(SUMS, 8 * max(unit_roundoff(reference.entries[step, 0, "main_grad", n, UNCLIPPED].dtype) for n in names))
    factor = coefficient(before, clip.max_norm)
    if not before or abs(clip.norm / before - 1) > room or abs(after / (factor * before) - 1) > 2 * room:
        return []  # its numbers do not fit together, so those of the candidate need not
    mine = [assembler.merge((step, 0, "main_grad", n, UNCLIPPED)) for n in names]
    if any(m is None or m.full is None for m in mine):
        return []
    dtypes = [reference.entries[step, 0, "main_grad", n, UNCLIPPED].dtype for n in names]
    norm = total_norm((m.full, d) for m, d in zip(mine, dtypes, strict=True) if m is not None and m.full is not None)
    out = [_norm(reference, assembler, step, norm, room)]
    later = [assembler.merge((step, 0, "main_grad", n, "")) for n in names]
    if norm and all(m is not None and m.full is not None for m in later):
        left = total_norm((m.full, d) for m, d in zip(later, dtypes, strict=True) if m is not None and m.full is not None)
        out.append(_coefficient(reference, assembler, step, left / norm, coefficient(norm, clip.max_norm), room))
    return [v for v in out if v is not None]


def _norm(reference: Reference, assembler: Assembler, step: int, norm: float, room: float) -> TensorVerdict | None:
    """Every rank that clips by a limit must do so by the norm of the whole gradient."""
    wrong: dict[int, float] = {}
    told: list[int] = []
    for rank, record in assembler.ranks.items():
        clips = [c for c in record.info.clips if c.step == step]
        if len(clips) != 1 or clips[0].norm_type != "2.0":
            return None  # another way of doing it
        value = clips[0].norm
        if clips[0].max_norm is None and (value is None or abs(value - norm) > room * norm):
            return None  # it measures, and may add up by itself
        told.append(rank)
        if value is None or abs(value - norm) > 2 * room * norm:
            wrong[rank] = math.nan if value is None else value
    note = ""
    if wrong:
        rank, value = next(iter(wrong.items()))
        own = total_norm(_local(assembler, rank, step))
        note = f"rank {rank} clips by a norm of {value:.6g}; that of the whole gradient is {norm:.6g}"
        if own and abs(value - own) <= 4 * room * own:
            note += ", that of what the rank itself holds is the one it took"
        padded = math.hypot(norm, _padding(assembler, step))
        if padded > norm and abs(value - padded) <= 4 * room * padded:
            note += ", to which padding adds that of its own gradient"
    worst = max((abs(v - norm) / norm if math.isfinite(v) else math.inf for v in wrong.values()), default=0.0) if norm else 0.0
    return _verdict(reference, step, "grad_norm", worst, 2 * room, sorted(wrong) or told, note)


def _coefficient(reference: Reference, assembler: Assembler, step: int, mine: float, asked: float, room: float) -> TensorVerdict:
    off = abs(mine - asked) / asked
    note = f"gradients are multiplied by {mine:.6g} between clipping and update, their norm asks for {asked:.6g}" if off > 4 * room else ""
    return _verdict(reference, step, "clip_coefficient", off, 4 * room, sorted(assembler.ranks), note)


def _only_clip(infos: Iterable[ProcessInfo]) -> dict[int, Clip]:
    """The one call of `clip_grad_norm_` of each step; steps with several, or with another norm, are left out."""
    found: dict[int, list[Clip]] = {}
    for info in infos:
        for clip in info.clips:
            found.setdefault(clip.step, []).append(clip)
    return {step: clips[0] for step, clips in found.items() if len(clips) == 1 and clips[0].norm_type == "2.0"}


def _values(reference: Reference, step: int, names: Sequence[str], slot: str) -> Iterator[tuple[Array, str]]:
    for name in names:
        entry = reference.entries[step, 0, "main_grad", name, slot]
        yield reference.array(entry), entry.dtype


def _padding(assembler: Assembler, step: int) -> float:
    """Norm of the gradient of what the reference has not."""
    held = [pieces for k, pieces in assembler.padded.items() if (k[0], k[2], k[4]) == (step, "main_grad", UNCLIPPED)]
    return math.hypot(*(padding_norm(assembler, pieces) for pieces in held))


def _local(assembler: Assembler, rank: int, step: int) -> Iterator[tuple[Array, str]]:
    record = assembler.ranks[rank]
    for entry in record.entries:
        if entry.step == step and entry.kind == "main_grad" and entry.slot == UNCLIPPED:
            yield record.array(entry), entry.dtype


# -- settings of optimizers ---------------------------------------------------------------------------------


def _settings(reference: Reference, assembler: Assembler, step: int) -> list[TensorVerdict]:
    theirs = {name: group for record in reference.ranks.values() for name, group in _by_parameter(record.info, step).items()}
    mine = {rank: _by_parameter(record.info, step) for rank, record in assembler.ranks.items()}
    wrong: dict[tuple[str, float, float], dict[str, set[int]]] = {}
    compared: set[str] = set()
    for name, group in theirs.items():
        for rank, entry in assembler.pieces.get((0, 0, "param", name, ""), []):
            other = mine[rank].get(entry.name)
            if other is None:
                continue
            for key in _comparable(group, other):
                a, b = group.values[key], other.values[key]
                compared.add(key)
                if abs(a - b) > EXACT * max(abs(a), abs(b)):
                    wrong.setdefault((key, b, a), {}).setdefault(name, set()).add(rank)
    out = [_verdict(reference, step, key, 0.0, EXACT, sorted(mine), "") for key in sorted(compared & {"lr"}) if all(w[0] != key for w in wrong)]
    for (key, b, a), where in wrong.items():
        names = sorted(where)
        ranks = sorted(set().union(*where.values()))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        note = f"{key} {b:.6g} for {names[0]}{more} on {rank_text(ranks)}, the reference has {a:.6g}"
        slot = "" if sum(w[0] == key for w in wrong) == 1 else names[0]
        out.append(_verdict(reference, step, key, abs(a - b) / abs(a) if a else math.inf, EXACT, ranks, note, slot))
    return out


def _again(reference: Reference, assembler: Assembler, step: int) -> list[TensorVerdict]:
    """Updates of one gradient: a second one begins a step of its own, so tensors of the first do not show it."""
    theirs = any(step in record.info.again for record in reference.ranks.values())
    apart = sorted(rank for rank, record in assembler.ranks.items() if (step in record.info.again) != theirs)
    if not apart:
        return []
    who = f"on {rank_text(apart)} an optimizer updates"
    note = f"{who} once only, the reference's once more with the same gradients" if theirs else f"{who} once more with the same gradients, the reference's does not"
    return [_verdict(reference, step, UPDATES, 1.0, EXACT, apart, note)]


def _by_parameter(info: ProcessInfo, step: int) -> Mapping[str, OptimizerGroup]:
    """The group that each parameter was updated by; of an optimizer within another, the inner one."""
    return {name: group for group in info.groups if group.step == step for name in group.params}


def _comparable(a: OptimizerGroup, b: OptimizerGroup) -> list[str]:
    if a.optimizer != b.optimizer:
        return [k for k in SAME_MEANING if k in a.values and k in b.values]
    return [k for k in a.values if k in b.values]


def _verdict(
    reference: Reference, step: int, name: str, off: float, allowed: float, ranks: Sequence[int], note: str, slot: str = ""
) -> TensorVerdict:
    ratio = off / allowed
    at = [e.order for k, e in reference.entries.items() if k[0] == step and (k[2], k[3]) == ("scalar", "grad_norm")]
    grads = [e.order for k, e in reference.entries.items() if k[0] == step and k[2] == "main_grad" and not k[4]]
    order = at[0] if at and name == "grad_norm" else max(grads, default=0) + 1
    if at and name == "clip_coefficient":
        order = at[0]
    return TensorVerdict(
        step=step,
        kind="scalar",
        name=name,
        slot=slot,
        rel_err=off,
        abs_err=off,
        tolerance=allowed,
        ratio=ratio,
        verdict="bad" if ratio > 1 or math.isnan(ratio) else "ok",
        ranks=tuple(ranks),
        order=float(order),
        note=note,
    )
