"""Every holder of a replica must have it, and equal: what tolerances are too wide to see.

A rank that makes no update, a weight that is not its master copy rounded, replicas that begin apart: in bfloat16 an update is smaller than
the rounding of what it updates, so none of these need show against the reference. They are a matter of bits, and of who took part.

The reverse, too: a program may update each rank by its own gradient and average parameters instead. For an update that is linear in the gradient that is the
same mathematics, and the parameters after it say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict
from proctor.oracle.merging.assemble import GRADIENTS, Assembler, Piece
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.merging.replicas import same_bits
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating
from proctor.oracle.numbers.tolerance import unit_roundoff
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import MASTER, Entry

Array = npt.NDArray[Any]

MOVED: Final = 4  # elements that an update must have changed elsewhere: fewer may be rounding that fell out otherwise
STAYED: Final = 20  # elements that stay although the nearest value is another one: rounding by chance leaves so many once in a million times
OWN: Final = "each rank updates by its own; the parameters are right after it"
_RIGHT: Final = frozenset({"ok", "warn"})


class Holders:
    """Who of a candidate's ranks has what.

    Args:
        reference: that is trusted.
        assembler: of the candidate.
    """

    def __init__(self, reference: Reference, assembler: Assembler) -> None:
        self.reference, self.assembler, self._ranks = reference, assembler, assembler.ranks

    # -- before the first step ------------------------------------------------------------------------------

    def begin_apart(self) -> list[ReplicaConflict]:
        """Replicas of parameters that differ before the first step, and after it still."""
        out = []
        for key in self.reference.order:
            if key[2] != "param" or key[0]:
                continue
            merged = self.assembler.merge(key)
            apart = merged.conflicts if merged is not None else ()
            later = self.assembler.merge((0, 0, "param_after", key[3], "")) if apart else None
            if not apart or (later is not None and later.full is not None and not later.conflicts):
                continue  # they are made alike by the first forward
            entry = self.reference.entries[key]
            for c in apart:
                out.append(
                    ReplicaConflict(
                        kind="param", name=key[3], axis=c.axis, ranks=c.minority, majority=c.majority, rel_err=c.rel, cls=entry.cls, source=entry.source,
                        order=float(entry.order), note="replicas begin apart and stay apart: nothing makes them alike (a broadcast is missing)",
                    )
                )  # fmt: skip
        return out

    # -- after a step ---------------------------------------------------------------------------------------

    def still(self, key: Key) -> tuple[list[int], list[int]]:
        """Of a parameter after a step: ranks whose replica the step left as it was, and those whose same replica it moved."""
        parts: dict[tuple[bytes, ...], tuple[list[int], list[int]]] = {}
        for piece in self.assembler.placed(key):
            before = self._before(piece, key)
            if piece.places is None or before is None or before.dtype != piece.entry.dtype or before.shape != piece.entry.shape:
                continue
            record = self._ranks[piece.rank]
            changed = int((record.array(before) != record.array(piece.entry)).sum())
            stays, moves = parts.setdefault(tuple(i.tobytes() for i in piece.places), ([], []))
            if changed >= min(MOVED, max(1, int(np.prod(piece.entry.shape)))):
                moves.append(piece.rank)
            elif not changed:
                stays.append(piece.rank)
        both = [(s, m) for s, m in parts.values() if s and m]
        return sorted({r for s, _ in both for r in s}), sorted({r for _, m in both for r in m})

    def _before(self, piece: Piece, key: Key) -> Entry | None:
        place = (0, 0, "param", key[3], "") if key[0] == 0 else (key[0] - 1, 0, "param_after", key[3], "")
        return next((e for r, e in self.assembler.pieces.get(place, ()) if r == piece.rank), None)

    def judge(self) -> tuple[list[TensorVerdict], list[ReplicaConflict]]:
        """What is wrong after each step."""
        tensors: list[TensorVerdict] = []
        replicas: list[ReplicaConflict] = []
        for step in range(self.reference.recording.info.steps):
            keys = [k for k in self.reference.order if k[0] == step and k[2] == "param_after"]
            for key in keys:
                stays, moves = self.still(key)
                if stays:
                    replicas.append(self._conflict(key, stays, moves, f"the step moves it on {rank_text(moves)} and leaves it as it was on {rank_text(stays)}"))
            tensors += self._masters(step)
            replicas += self._idle(step, keys) if not any(r.step == step for r in replicas) else ()
        return tensors, replicas

    def _idle(self, step: int, keys: Sequence[Key]) -> Iterator[ReplicaConflict]:
        """Ranks whose optimizers took nothing, and none of whose parameters moved by anybody's doing."""
        took = {rank for rank, record in self._ranks.items() if any(e.step == step and e.kind == "main_grad" for e in record.entries)}
        if not took:
            return
        moved = {piece.rank for key in keys for piece in self.assembler.placed(key)
                 if (b := self._before(piece, key)) is not None and not same_bits(self._ranks[piece.rank].array(b), self._ranks[piece.rank].array(piece.entry))}  # fmt: skip
        for key in keys:
            held = {piece.rank for piece in self.assembler.placed(key)}
            idle = sorted(held - took - moved)
            if idle and held & took and (step, 0, "main_grad", key[3], "") in self.assembler.pieces:
                yield self._conflict(key, idle, sorted(held & took), f"no optimizer of {rank_text(idle)} took a gradient, and no parameter moved there")
                return

    # -- master copies --------------------------------------------------------------------------------------

    def _masters(self, step: int) -> Iterator[TensorVerdict]:
        """Weights that are not their masters, rounded."""
        nearest = all(off == 0 for record in self.reference.ranks.values() for _, off, _, _ in _rounded(record, step))
        known = any(True for record in self.reference.ranks.values() for _ in _rounded(record, step))
        wrong: dict[str, tuple[list[int], int, int, str]] = {}
        for rank, record in self._ranks.items():
            named = {e.name: k[3] for k, held in self.assembler.pieces.items() if k[2] == "param" for r, e in held if r == rank}
            for name, off, far, stays in _rounded(record, step):
                bad = far or (off if known and nearest else 0) or (stays if stays >= STAYED else 0)
                if bad and name in named:
                    note = "the step leaves the weight as it was, though its master moved" if stays == off else f"{bad:,} elements of the weight are not those of its master copy, rounded"
                    ranks = wrong.setdefault(named[name], ([], bad, off, note))[0]
                    ranks.append(rank)
        for name, (ranks, bad, _, note) in wrong.items():
            key = (step, 0, "param_after", name, "")
            entry = self.reference.entries.get(key)
            yield TensorVerdict(
                step=step, kind="master", name=name, cls=entry.cls if entry else "", source=entry.source if entry else "", rel_err=1.0, abs_err=float(bad),
                tolerance=0.0, ratio=float("inf"), verdict="bad", ranks=tuple(sorted(ranks)), order=float(entry.order if entry else self.reference.last), note=note,
            )  # fmt: skip

    def _conflict(self, key: Key, ranks: Sequence[int], majority: Sequence[int], note: str) -> ReplicaConflict:
        entry = self.reference.entries[key]
        return ReplicaConflict(
            kind=key[2], name=key[3], axis="rank", ranks=tuple(ranks), majority=tuple(majority), step=key[0], cls=entry.cls, source=entry.source,
            order=float(entry.order), note=note,
        )  # fmt: skip


def _rounded(record: RankRecord, step: int) -> Iterator[tuple[str, int, int, int]]:
    """Of a rank's masters in wider types than their weights: name, elements that are not their nearest value, elements that are neither neighbour, and
    of the former those that the step left as they were."""
    after = {e.name: e for e in record.entries if e.step == step and e.kind == "param_after" and e.span is None}
    place = ("param", 0) if step == 0 else ("param_after", step - 1)
    before = {e.name: e for e in record.entries if (e.kind, e.step) == place and e.span is None}
    for entry in record.entries:
        weight = after.get(entry.name)
        if entry.step != step or entry.kind != "opt_state" or entry.slot != MASTER or weight is None or weight.tile or entry.tile or not is_floating(weight.dtype):
            continue
        u = unit_roundoff(weight.dtype)
        if u <= unit_roundoff(entry.dtype):
            continue
        master = as_float(record.array(entry), entry.dtype).astype(np.float32).ravel()
        held, old = record.array(weight).ravel(), before.get(entry.name)
        start, stop = entry.span if entry.span is not None else (0, held.size)
        if stop - start != master.size:
            continue
        held = held[start:stop]
        off = held != from_float(master, weight.dtype)
        values = as_float(held, weight.dtype).astype(np.float64)
        with np.errstate(invalid="ignore"):
            far = np.abs(values - master) > 2.0 * u * np.abs(master) + 1e-30
        stays = off & (held == record.array(old).ravel()[start:stop]) if old is not None and old.shape == weight.shape else np.zeros_like(off)
        moved = bool((held != record.array(old).ravel()[start:stop]).any()) if old is not None and old.shape == weight.shape else True
        yield entry.name, int(off.sum()), int(far.sum()), 0 if moved else int(stays.sum())


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
    """Gradients that cross modules that the candidate calls less often than all ranks of a reference together.

    The rows of one rank are then matched by content (`rows.py`); of several, each has averaged its loss over its own rows.

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
