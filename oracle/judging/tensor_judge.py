"""Is one tensor of the candidate the reference's? Merged from its shards, against its tolerance, and in what way it is wrong.

Replicas of one place are held against the reference where they differ, which names the rank that is wrong even where two
ranks disagree. What activations gave that were computed again is held against the first pass. Source: TTrace §4.4.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.certain import Certain
from proctor.oracle.judging.rows import Scattered
from proctor.oracle.judging.scalars import clip_room
from proctor.oracle.judging.verdicts import (
    ASTRAY,
    ReplicaConflict,
    TensorVerdict,
    Word,
    explain_difference,
    failing,
    judge,
    not_compared,
    with_slopes,
)
from proctor.oracle.merging.align import BUFFERS, PARAMETERS, Naming
from proctor.oracle.merging.assemble import Assembler, Piece
from proctor.oracle.merging.averages import MEAN
from proctor.oracle.merging.locate import FITS, take
from proctor.oracle.merging.reference import Key, Reference, constant, slot_text, telling
from proctor.oracle.merging.replicas import Conflict, same_bits
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating
from proctor.oracle.numbers.moments import owed
from proctor.oracle.numbers.slopes import cuts, flags, slopes
from proctor.oracle.numbers.tolerance import UNIT_ROUNDOFF, Mode, Tolerance, tolerance
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]

SHORT: Final = ("bfloat16", "float16")  # types whose noise hides an error of one per cent
# Of a gradient's tolerance by element: below it the update may be noise, through the sign or through Adam's epsilon. The first that
# leaves half of the tensor; three of 532 correct runs had one element between 10 and 100.
NOISE_MULTIPLES: Final = (100.0, 10.0)
SAME: Final = 1e-4  # relative: a shard is this part and no other one


class TensorJudge:
    """Judges the candidate's tensors one by one.

    Args:
        reference: trusted.
        assembler: of the candidate.
        scattered: where rows are that the assembler cannot place.
        mode: of tolerances.
        alone: every module was fed the reference's values.
    """

    def __init__(self, reference: Reference, assembler: Assembler, scattered: Scattered, mode: Mode, *, alone: bool) -> None:
        self.reference, self.assembler, self.scattered, self.mode, self.alone = reference, assembler, scattered, mode, alone
        self.ranks = assembler.ranks
        self._certain = Certain(reference, assembler, mode)
        self._clip_rooms: dict[int, float] = {}
        self.unchecked: list[str] = []

    def judge(self, key: Key) -> tuple[TensorVerdict | None, list[ReplicaConflict]]:
        """The verdict of a tensor of the reference, `None` where none is due, and replicas of it that are wrong."""
        target = self.reference.entries[key]
        step, call, kind, name, slot = key
        if kind in ("choice", "mask"):
            return None, []  # see `choices`; masks are the candidate's own, which it has not used
        if kind in BUFFERS:
            return None, []  # see `buffers`
        if kind == "scalar":
            return None, []  # see `scalars`; what a loss is averaged over is the program's business, and gradients tell whether it is right
        if kind == "param" and step == 0:
            return (None, []) if key in self.assembler.pieces else (self._missing(key, target), [])
        merged = self.scattered.merge(key) or self.assembler.merge(key)
        if merged is None:
            return (self._missing(key, target) if kind in ("main_grad", "param_after") and not slot else None), []
        full, conflicts, pieces = merged
        labels = sorted({p.label for p in pieces if p.label})
        # Replicas that are equal bit for bit are no partial sums: the whole is where it seems to be.
        alike = len({p.rank for p in pieces}) > 1 and not conflicts and all(p.label == "whole" for p in pieces)
        firm = alike or all(p.firm or (p.label == "whole" and self._certain(p.rank, key, p.entry)) for p in pieces)
        common: dict[str, Any] = {  # Any: keyword arguments
            "step": step,
            "call": call,
            "kind": kind,
            "name": name,
            "slot": slot,
            "cls": target.cls,
            "source": pieces[0].entry.source or target.source,
            "layout": "; ".join(labels[:4]),
            "order": float(target.order),
        }
        ranks = sorted({p.rank for p in pieces})
        if full is None:
            note = f"its shards {', '.join(str(list(p.entry.shape)) for p in pieces[:4])} do not make up {list(target.shape)}"
            flat = any(p.entry.span is not None for p in pieces)
            if self._lost(pieces, key):
                return not_compared("unmapped", f"nobody holds a part of it; what {rank_text(ranks)} hold are other parts", **{**common, "layout": ASTRAY}), []
            return not_compared("shape" if firm and kind in PARAMETERS and not flat else "unmapped", note, **common), []
        theirs = self.reference.array(target)
        if (scale := self.assembler.scale(kind, slot)) != 1.0:
            full = from_float(as_float(full, target.dtype) / scale, target.dtype)
        sums = compare(full, theirs, target.dtype)
        allowed = self._with_clipping(key, self.reference.tolerance(key, sums, self.mode), sums.size)
        if kind == "param_after" and sums.error > allowed.absolute and not sums.mismatch and not target.tile:
            sums = self._where_gradients_tell(key, full, theirs, sums)
        if sums.error > allowed.absolute and not sums.mismatch and sums.rounded:
            few = telling(as_float(full, target.dtype) - as_float(theirs, target.dtype))  # an error in a few elements is as uncertain as a tensor of so few
            if few < sums.n:
                allowed = self._with_clipping(key, self.reference.tolerance(key, msgspec.structs.replace(sums, n=few), self.mode), sums.size)
        if kind == "opt_state" and sums.error > allowed.absolute and not sums.mismatch and sums.rounded and not target.tile:
            sums = self._without_gradients_part(key, full, theirs, sums)
        note = self._explain(key, full, theirs, sums, allowed.absolute, conflicts, pieces) if sums.error > allowed.absolute else ""
        found = judge(sums, allowed, **common, ranks=ranks, note=note)
        # No other place has values like these.
        more = kind in ("output", "grad_output") and not all(p.entry.placement for p in pieces) and any(self._got_more(p, key) for p in pieces)
        near = (firm and not more) or (not more and sums.relative < FITS and kind in ("output", "input", "score", "dropped") and MEAN not in labels)
        if failing(found) and (not near or (not sums.rounded and kind != "input")):
            found = msgspec.structs.replace(found, verdict="unmapped")
        if firm and sums.rounded and not failing(found) and (self.alone or target.dtype in SHORT):
            found = self._sloped(key, found, full, theirs)
        apart = [c for c in conflicts if c.rel * sums.size > allowed.absolute or not np.isfinite(c.rel)] if firm else []
        if not apart:
            if conflicts and not firm and not failing(found) and found.verdict != "unmapped":
                wrong, worst = self._strays(pieces, theirs, allowed.absolute, kind)
                if wrong and len(wrong) < len(ranks):
                    found = judge(worst, allowed, **{**common, "layout": ASTRAY}, ranks=wrong, note=f"not on {rank_text(wrong)}")
                    found = msgspec.structs.replace(found, verdict="unmapped")
                self.unchecked.append(f"{kind} {name}{slot_text(slot)}: {rank_text(sorted(r for c in conflicts for r in c.minority))} hold another value; whether it is meant to be the whole is not known")
            return found, []
        wrong, worst = self._strays(pieces, theirs, allowed.absolute, kind)
        if wrong and not failing(found):
            note = f"not on {rank_text(wrong)}: replicas differ"
            found = judge(worst, allowed, **common, ranks=wrong, note=note)
        return found, [self._conflict(c, wrong, allowed.absolute / sums.size if sums.size else 0.0, common) for c in apart]

    def _with_clipping(self, key: Key, allowed: Tolerance, size: float) -> Tolerance:
        """A tolerance with room for the rounding of the norm that clipping took, in what comes after it."""
        step, _, kind, _, slot = key
        times = {"main_grad": 0.0 if slot else 1.0, "opt_state": 2.0, "param_after": 1.0}.get(kind, 0.0)  # squares of gradients differ twice as much
        if not times:
            return allowed
        if step not in self._clip_rooms:
            self._clip_rooms[step] = clip_room(self.reference, self.assembler, step)
        room = times * self._clip_rooms[step] * (allowed.signal if kind == "param_after" else size)
        return msgspec.structs.replace(allowed, absolute=allowed.absolute + room) if room else allowed

    def _lost(self, pieces: Sequence[Piece], key: Key) -> bool:
        """Whether every shard is a part of the reference's beyond doubt and another part is held by nobody: of what goes into the model, where two
        ranks hold the same part, or where a rank does not call the module."""
        target = self.reference.entries[key]
        if key[2] not in ("input", "output") or any(p.places is None or p.addend or not p.firm or p.entry.placement is not None for p in pieces):
            return False
        theirs, held = self.reference.floats(target), dict[tuple[bytes, ...], int]()
        for p in pieces:
            mine, other = as_float(self.assembler.values(p), p.entry.dtype), take(theirs, p.places or ())
            if mine.shape != other.shape or float(np.linalg.norm((mine - other).ravel())) > SAME * float(np.linalg.norm(other.ravel())):
                return False
            held[tuple(i.tobytes() for i in p.places or ())] = other.size
        some = len(held) < len(pieces) or key[2:4] == ("input", "") or len({p.rank for p in pieces}) < len(self.ranks)
        return some and len(pieces) == len(self.assembler.pieces[key]) and sum(held.values()) < theirs.size

    def _got_more(self, piece: Piece, key: Key) -> bool:
        """Whether a module got more rows in its call than the reference's did: then this call is several of the reference's, or none of them."""
        step, call, _, name, _ = key
        for slot in self.reference.slots.get((step, call, "input", name), ()):
            there = (step, call, "input", name, slot)
            theirs = self.reference.entries[there].shape
            for rank, entry in self.assembler.pieces.get(there, ()):
                same = rank == piece.rank and entry.call == piece.entry.call and len(entry.shape) == len(theirs) and entry.placement is None
                if same and len(theirs) > 1 and entry.shape[0] > theirs[0] and entry.shape[1:] == theirs[1:]:
                    return True
        return False

    def _explain(
        self, key: Key, full: Array, theirs: Array, sums: Difference, allowed: float, conflicts: Sequence[Conflict], pieces: Sequence[Piece]
    ) -> str:
        """In what way a tensor is wrong."""
        target = self.reference.entries[key]
        parts: list[Array] = []
        if conflicts and all(p.entry.dtype == target.dtype for p in pieces):
            held = [self.assembler.values(p) for p in pieces]
            parts = held if all(h.shape == target.shape for h in held) else []
        earlier: dict[str, Array] = {}
        for step, call, word in ((key[0] - 1, key[1], "the step before"), (key[0], key[1] - 1, "the microbatch before")):
            before = self.reference.entries.get((step, call, *key[2:]))
            if before is not None and before.shape == target.shape:
                earlier[word] = self.reference.array(before)
        axis = conflicts[0].axis if conflicts else ""
        return explain_difference(full, theirs, target.dtype, key[2], allowed, difference=sums, parts=parts, axis=axis, earlier=earlier)

    def _sloped(self, key: Key, found: TensorVerdict, full: Array, theirs: Array) -> TensorVerdict:
        """Look for a head, shard or chunk that is scaled by less than noise shows in the norm."""
        dtype = self.reference.entries[key].dtype
        for dim, parts in cuts(theirs.shape):
            noise, samples = self.reference.slopes(key, dim, parts)
            seen = slopes(full, theirs, dtype, dim, parts)
            raised = flags(seen, noise, samples, UNIT_ROUNDOFF[dtype], alone=self.alone)
            found = with_slopes(found, raised, dim, parts, alone=self.alone)
        return found

    def _where_gradients_tell(self, key: Key, full: Array, theirs: Array, sums: Difference) -> Difference:
        """The difference without elements whose gradient is rounding noise.

        An adaptive optimizer moves each element by the sign of its gradient at first, whatever its size: where that is noise, so is
        the move, and a few samples need not have seen it turn. Nothing is left out where that would be most of the tensor.
        """
        grad = self.reference.entries.get((key[0], 0, "main_grad", key[3], ""))
        if grad is None or grad.shape != theirs.shape or not grad.shape:
            return sums
        values = self.reference.array(grad)
        place = (key[0], 0, "main_grad", key[3], "")
        allowed = self.reference.tolerance(place, compare(values, values, grad.dtype), self.mode).absolute
        sizes = np.abs(as_float(values, grad.dtype))
        for multiple in NOISE_MULTIPLES:
            tells = sizes > multiple * allowed / np.sqrt(values.size)
            if 2 * int(tells.sum()) >= values.size:
                return compare(np.where(tells, full, theirs), theirs, self.reference.entries[key].dtype)
        return sums

    def _without_gradients_part(self, key: Key, full: Array, theirs: Array, sums: Difference) -> Difference:
        """The difference of a moment without the part that its gradient makes, where that is within rounding; see `moments`."""
        place = (key[0], 0, "main_grad", key[3], "")
        grad, state = self.reference.entries.get(place), self.reference.entries[key]
        merged = self.assembler.merge(place) if grad is not None else None
        if grad is None or merged is None or merged.full is None or not all(p.firm for p in merged.pieces):
            return sums
        took = self.reference.array(grad)
        apart = compare(merged.full, took, grad.dtype)
        if apart.error > self.reference.tolerance(place, apart, self.mode).absolute or took.shape != theirs.shape:
            return sums
        rounding = max(UNIT_ROUNDOFF.get(grad.dtype, 0.0), UNIT_ROUNDOFF.get(state.dtype, 0.0))
        part = owed(as_float(theirs, state.dtype), as_float(took, grad.dtype), as_float(merged.full, grad.dtype), rounding)
        if part is None:
            return sums
        return compare(from_float(as_float(full, state.dtype) - part, state.dtype), theirs, state.dtype)

    def _strays(self, pieces: Sequence[Piece], theirs: Array, allowed: float, kind: str) -> tuple[list[int], Difference]:
        """Ranks whose own shard is not the reference's, and the worst difference."""
        wrong: list[int] = []
        worst: Difference | None = None
        for piece in pieces:
            if piece.places is None or piece.addend:
                continue
            mine = self.assembler.values(piece)
            if (scale := self.assembler.scale(kind, piece.entry.slot)) != 1.0:
                mine = from_float(as_float(mine, piece.entry.dtype) / scale, piece.entry.dtype)
            target = take(theirs, piece.places).copy()
            sums = compare(mine, target, piece.entry.dtype) if mine.dtype == target.dtype else None
            if sums is not None and (sums.error > allowed or sums.mismatch):
                wrong.append(piece.rank)
            if sums is not None and (worst is None or sums.error > worst.error):
                worst = sums
        assert worst is not None or not wrong
        return sorted(set(wrong)), worst or Difference(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)

    def _missing(self, key: Key, target: Entry) -> TensorVerdict:
        step, call, kind, name, slot = key
        words = {
            "param": "the candidate has no such parameter",
            "main_grad": "no optimizer of the candidate took a gradient of it",
        }
        note = words.get(kind, "the candidate has none")
        word: Word = "missing"
        if kind == "main_grad" and self._constant_in_flats(name):
            note, word = "its values are all alike, so its place in the optimizer's flat tensors is not known", "unmapped"
        return not_compared(
            word, note, step=step, call=call, kind=kind, name=name, order=float(target.order), slot=slot, cls=target.cls, source=target.source
        )

    def _constant_in_flats(self, name: str) -> bool:
        """Whether optimizers of the candidate hold flat tensors, in which a parameter of one value cannot be found."""
        param = self.reference.entries.get((0, 0, "param", name, ""))
        return param is not None and constant(self.reference.array(param)) and self._flat

    @functools.cached_property
    def _flat(self) -> bool:
        return any(e.span is not None for record in self.ranks.values() for e in record.entries)

    def _conflict(self, conflict: Conflict, wrong: Sequence[int], allowed: float, common: Mapping[str, Any]) -> ReplicaConflict:
        where = f"along {conflict.axis}" if conflict.axis not in ("", "rank") else f"between {rank_text(conflict.ranks)}"
        return ReplicaConflict(
            **{k: v for k, v in common.items() if k != "layout"},
            axis=conflict.axis,
            ranks=tuple(r for r in conflict.ranks if r in wrong) or conflict.minority,
            majority=tuple(r for r in conflict.ranks if r not in wrong) if any(r in wrong for r in conflict.ranks) else conflict.majority,
            rel_err=conflict.rel,
            ratio=conflict.rel / allowed if allowed else float("inf"),
            note=f"replicas differ {where}: a collective is missing or wrong",
        )

    def recomputed(self, naming: Mapping[int, Naming]) -> list[TensorVerdict]:
        """What activations that are computed again have as another value than in the first pass.

        Args:
            naming: by rank, what the reference calls things.
        """
        out: list[TensorVerdict] = []
        for rank, record in self.ranks.items():
            first: dict[tuple[int, str, str], list[Entry]] = {}
            for entry in record.entries:
                if entry.kind == "output" and not entry.recompute:
                    first.setdefault((entry.step, entry.name, entry.slot), []).append(entry)
            for entry in record.entries:
                if entry.kind != "output" or not entry.recompute or not is_floating(entry.dtype):
                    continue
                again = record.array(entry)
                options = [e for e in first.get((entry.step, entry.name, entry.slot), []) if e.shape == entry.shape]
                if not options or any(same_bits(again, record.array(e)) for e in options):
                    continue
                name = naming[rank](entry)
                best = min((compare(again, record.array(e), entry.dtype) for e in options), key=lambda s: s.error)
                key = (entry.step, 0, "output", name, entry.slot)
                allowed = self.reference.tolerance(key, best, self.mode) if key in self.reference.entries else tolerance(0.0, best.size, entry.dtype, n=best.n)
                if best.error <= allowed.absolute:
                    continue
                out.append(
                    judge(
                        best,
                        allowed,
                        step=entry.step,
                        call=entry.call,
                        kind="output",
                        name=name,
                        slot=entry.slot,
                        cls=entry.cls,
                        source=entry.source,
                        ranks=[rank],
                        order=float(self.reference.last + entry.order),
                        note="recomputation in the backward pass gives another value than the first forward pass did",
                    )
                )
        return out
