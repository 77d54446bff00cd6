"""Is the candidate the same computation as the reference? Every tensor, merged from its shards, against its tolerance.

First the reference against itself (is it deterministic, is it finite?), then whether both runs began alike, then the
replicas of the candidate among one another, then candidate against reference in the order of the reference's data flow.
Source: TTrace §4.4.

Where a tensor lies is known from the plan, from a DTensor, or by content (`locate.py`). A tensor whose place nobody
knows is *unmapped*: it is listed, it may be named as the place where a difference begins, and it never decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle._replicas import Conflict, same_bits
from proctor.oracle.align import PARAMETERS, Calls, Naming, count_calls, deal_calls, kept_names, name_tensors
from proctor.oracle.assemble import GRADIENTS, LIKE, REPLICA_AXES, Assembler, Piece
from proctor.oracle.compare import Difference, compare
from proctor.oracle.dtypes import as_float, from_float, is_floating
from proctor.oracle.locate import FITS, take
from proctor.oracle.mesh import Mesh, rank_text
from proctor.oracle.plan import Plan
from proctor.oracle.reference import Key, Reference, slot_text, telling
from proctor.oracle.scalars import judge_scalars
from proctor.oracle.slopes import cuts, flags, slopes
from proctor.oracle.store import Entry, RankRecord, Recording
from proctor.oracle.tolerance import UNIT_ROUNDOFF, Mode, tolerance
from proctor.oracle.verdicts import (
    ReplicaConflict,
    TensorVerdict,
    Verdict,
    Word,
    conclude,
    explain_difference,
    failing,
    flow,
    judge,
    not_compared,
    with_slopes,
)

Array = npt.NDArray[Any]


SHORT: Final = ("bfloat16", "float16")  # types whose noise hides an error of one per cent
# Of a gradient's tolerance by element: below it the update may be noise, through the sign or through Adam's epsilon. The first that
# leaves half of the tensor; three of 532 correct runs had one element between 10 and 100.
NOISE_MULTIPLES: Final = (100.0, 10.0)
SAMPLED_TENSORS: Final = 4
SAMPLED_CALLS: Final = 4


class Comparison:
    """One reference against one candidate.

    Args:
        reference: recorded with samples.
        candidate: what is judged.
        plan: how the candidate lies on its mesh; what it does not say is found by content.
        mode: `all` (noise everywhere, M = 3) or `paper` (noise on the input, M = 5).
        run: of the candidate; `forced` is that of `localise`.
    """

    def __init__(
        self, reference: Recording, candidate: Recording, plan: Plan | None = None, mode: Mode = "all", run: str = "clean"
    ) -> None:
        self.candidate, self.ranks = candidate, candidate.ranks(run)
        plan = plan if plan is not None else _read_off(self.ranks)
        self.plan = plan
        self.alone = run == "forced"
        self.mode = mode
        self.reference = Reference(reference)
        self.notes: list[str] = [f"candidate: {n}" for n in candidate.info.notes] + [f"reference: {n}" for n in reference.info.notes]
        self.unchecked: list[str] = []
        self.mesh = plan.mesh if plan is not None else Mesh()
        world = len(self.ranks)
        if plan is not None and plan.mesh.world != world:
            raise OracleError(
                f"the plan's mesh ({plan.mesh}) has {plan.mesh.world} ranks, the candidate ran with {world}", hint="change [mesh] sizes"
            )
        self._named = _mesh_of_dtensors(self.ranks)
        self.coords = {r: self._coords(r, record) for r, record in self.ranks.items()}
        self._naming: dict[int, Naming] = {}
        self._calls: dict[int, Calls] = {}
        self._counts: dict[int, dict[str, int]] = {}
        self._pieces: dict[Key, list[tuple[int, Entry]]] = {}
        self.assembler = Assembler(self.reference, self.ranks, self.coords, self._calls, plan, self._pieces)

    # -- the whole ------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Compare everything.

        Raises:
            OracleError: the recordings cannot be compared at all.
        """
        unusable = self.reference.problem(self.mode)
        if unusable:
            return conclude([], notes=self.notes, inconclusive=unusable)
        self.notes += self.reference.notes
        parameters = self.reference.parameters()
        taken = set().union(*(kept_names(parameters, record, self.plan, self.coords[rank]) for rank, record in self.ranks.items()))
        for rank, record in self.ranks.items():
            self._naming[rank] = name_tensors(parameters, record, self.plan, self.coords[rank], taken)
        self._say_names()
        self._index()
        different = self._start()
        if different:
            return different
        tensors: list[TensorVerdict] = []
        replicas: list[ReplicaConflict] = []
        self.assembler.gradient_scale = self._gradient_scale()
        self._allow_casts()
        for key in self.reference.order:
            verdict, conflicts = self._judge(key)
            if verdict is not None:
                tensors.append(verdict)
            replicas += conflicts
        tensors += judge_scalars(self.reference, self.assembler)
        tensors += self._recomputed()
        return self._conclude(tensors, replicas)

    def _allow_casts(self) -> None:
        """Casts to 8 bits get their own tolerance only where the first of them falls out otherwise than in the reference.

        A candidate that scales as the reference does makes the same casts; later differences are then no matter of scales.
        """
        key = self.reference.first_cast()
        if key is None:
            return
        self.reference.allow_fp8(False)
        found, _ = self._judge(key)
        same = found is not None and not failing(found) and found.verdict != "unmapped"
        self.reference.allow_fp8(not same)
        self.notes.append(
            "8-bit casts agree with the reference's at first, so tolerances leave no room for other scales"
            if same
            else "8-bit casts fall out otherwise than in the reference from the first on; tolerances leave room for that"
        )

    def _conclude(self, tensors: list[TensorVerdict], replicas: list[ReplicaConflict]) -> Verdict:
        self.unchecked += self.reference.not_seen(set(self._pieces)) + sorted(self._extra)
        for t in tensors:
            if t.verdict == "unmapped":
                self.unchecked.append(f"{t.kind} {t.name}{slot_text(t.slot)}: where its shards lie is not known; annotate it in a plan")
        wanted = any(k[2] == "main_grad" for k in self.reference.order)
        judged = any(t.kind == "main_grad" and t.verdict != "unmapped" for t in tensors)
        lacking = "no gradient of the candidate could be compared" if wanted and not judged else ""
        found = conclude(tensors, replicas, unchecked=self.unchecked, notes=self.notes, inconclusive=lacking)
        if found.verdict != "different":
            return found
        # A tensor that nobody has placed never decides, but a difference may begin in it.
        failing_ = [t for t in tensors if failing(t) or (t.verdict == "unmapped" and t.ratio > 1.0)]
        return msgspec.structs.replace(found, first=min(failing_, key=flow) if found.first is not None else None)

    def shards(self) -> Iterator[tuple[Key, list[Piece]]]:
        """The candidate's shards of each tensor of the reference, with their places; after `run`."""
        for key, held in self._pieces.items():
            yield key, [self.assembler.place(rank, entry, key, self.reference.entries[key]) for rank, entry in held]

    def names_of(self, module: str) -> dict[int, str]:
        """What ranks call a module of the reference; after `run`."""
        out: dict[int, str] = {}
        for rank, record in self.ranks.items():
            found = (e.name for e in record.entries if e.kind in ("input", "output") and self._naming[rank](e) == module)
            if (name := next(found, None)) is not None:
                out[rank] = name
        return out

    def call_of(self, rank: int, module: str, call: int) -> int:
        """The reference's call that a rank's call of a module is, as its process counts them; after `run`."""
        call -= self.ranks[rank].dry.get(0, 0)
        return self._calls[rank].of(call, self._counts[rank].get(module, 0), self.reference.calls.get(module, 0))

    # -- before tensors are compared ------------------------------------------------------------------------

    def _coords(self, rank: int, record: RankRecord) -> dict[str, int]:
        if self.plan is not None:
            return self.mesh.coords(rank)
        return dict(record.info.coords) or (self._named.coords(rank) if self._named is not None else {})

    def _say_names(self) -> None:
        said: dict[str, list[int]] = {}
        for rank, naming in self._naming.items():
            for here, there in naming.prefixes.items():
                said.setdefault(f"{here or 'its modules'} → {there or 'the root'}", []).append(rank)
        for text, ranks in list(said.items())[:12]:
            self.notes.append(f"matched by content: {text} on {rank_text(ranks)}")

    def _index(self) -> None:
        """Which shards make up each tensor of the reference."""
        self._extra: set[str] = set()
        for rank, record in self.ranks.items():
            naming = self._naming[rank]
            self._counts[rank] = count_calls(record.entries, naming, 0)
        for rank, record in self.ranks.items():
            naming = self._naming[rank]
            self._calls[rank] = self._deal(rank, record, naming)
            for entry in record.entries:
                if entry.recompute:
                    continue
                name = naming(entry)
                call = entry.call
                if entry.kind not in PARAMETERS:
                    call = self._calls[rank].of(call, self._counts[rank].get(name, 0), self.reference.calls.get(name, 0))
                key = (entry.step, call, entry.kind, name, entry.slot)
                if key not in self.reference.entries:
                    slots = self.reference.slots.get((entry.step, call, entry.kind, name), ())
                    mine = self._slots[rank, entry.step, entry.call, entry.kind, entry.name]
                    if len(slots) == len(mine):
                        key = (entry.step, call, entry.kind, name, slots[mine.index(entry.slot)])
                if key in self.reference.entries:
                    self._pieces.setdefault(key, []).append((rank, entry))
                elif entry.kind in ("param", "output"):
                    self._extra.add(f"{entry.kind} {name}: the reference has none of this name")

    @functools.cached_property
    def _slots(self) -> dict[tuple[int, int, int, str, str], list[str]]:
        """Places of what crosses an edge of a rank's module in a call, in the order of the record."""
        slots: dict[tuple[int, int, int, str, str], dict[str, None]] = {}
        for rank, record in self.ranks.items():
            for e in record.entries:
                if not e.recompute:
                    slots.setdefault((rank, e.step, e.call, e.kind, e.name), {})[e.slot] = None
        return {key: list(found) for key, found in slots.items()}

    def _deal(self, rank: int, record: RankRecord, naming: Naming) -> Calls:
        samples = []
        chosen: set[tuple[str, str, str]] = set()  # the first tensors to cross a module, in several calls: blocks or in turn?
        for entry in record.entries:
            if entry.step or entry.recompute or entry.kind not in ("input", "output") or entry.call >= SAMPLED_CALLS or not entry.shape:
                continue
            name = naming(entry)
            if (name, entry.kind, entry.slot) not in chosen and len(chosen) >= SAMPLED_TENSORS:
                continue
            full = {
                k[1]: self.reference.floats(e)
                for call in range(self.reference.calls.get(name, 0))
                if (k := (0, call, entry.kind, name, entry.slot)) in self.reference.entries
                for e in [self.reference.entries[k]]
                if len(e.shape) == len(entry.shape)
            }
            if len(full) > 1:
                chosen.add((name, entry.kind, entry.slot))
                samples.append((entry, as_float(record.array(entry), entry.dtype), full, self._counts[rank].get(name, 0)))
        coords = self.coords[rank]
        axes = [a for a in self.mesh.axes if a in REPLICA_AXES]
        replica = None
        if axes:
            replica = 0
            for axis in axes:
                replica = replica * self.mesh.size(axis) + coords[axis]
        return deal_calls(self.reference.calls, self._counts[rank], samples, replica)

    def _start(self) -> Verdict | None:
        """Both runs must begin with the same parameters."""
        off: list[str] = []
        mine = [k for k in self.reference.order if k[2] == "param" and k[0] == 0]
        for key in sorted(mine, key=lambda k: _constant(self.reference.array(self.reference.entries[k]))):
            merged = self.assembler.merge(key)
            if merged is None:
                continue
            full, _, pieces = merged
            theirs = self.reference.array(self.reference.entries[key])
            if full is None or not same_bits(full, theirs):
                a, b = as_float(theirs, self.reference.entries[key].dtype), None if full is None else as_float(full, pieces[0].entry.dtype)
                if b is None or a.shape != b.shape or float(np.linalg.norm(a - b)) > 1e-3 * float(np.linalg.norm(a)):
                    off.append(key[3])
        if not off:
            return None
        share = len(off) / len(mine)
        names = ", ".join(off[:3]) + (f" and {len(off) - 3} more" if len(off) > 3 else "")
        reason = f"the two runs do not begin with the same parameters ({names}; {share:.0%} of them): "
        reason += "record both with --generate, or say in a plan how they are cut"
        return msgspec.structs.replace(conclude([], unchecked=self.unchecked, notes=self.notes, inconclusive=reason), alike=False)

    # -- one tensor -----------------------------------------------------------------------------------------

    def _judge(self, key: Key) -> tuple[TensorVerdict | None, list[ReplicaConflict]]:
        target = self.reference.entries[key]
        step, call, kind, name, slot = key
        if kind == "scalar":
            return None, []  # see `scalars`; what a loss is averaged over is the program's business, and gradients tell whether it is right
        if kind == "param" and step == 0:
            return (None, []) if key in self._pieces else (self._missing(key, target), [])
        merged = self.assembler.merge(key)
        if merged is None:
            return (self._missing(key, target) if kind in ("main_grad", "param_after") and not slot else None), []
        full, conflicts, pieces = merged
        labels = sorted({p.label for p in pieces if p.label})
        # Replicas that are equal bit for bit are no partial sums: the whole is where it seems to be.
        alike = len({p.rank for p in pieces}) > 1 and not conflicts and all(p.label == "whole" for p in pieces)
        firm = alike or all(p.firm for p in pieces)
        common: dict[str, Any] = {  # Any: keyword arguments
            "step": step,
            "call": call,
            "kind": kind,
            "name": name,
            "slot": slot,
            "cls": target.cls,
            "source": pieces[0].entry.source or target.source,
            "layout": "; ".join(labels[:4]),
            "order": self._order(key),
        }
        ranks = sorted({p.rank for p in pieces})
        if full is None:
            note = f"its shards {', '.join(str(list(p.entry.shape)) for p in pieces[:4])} do not make up {list(target.shape)}"
            flat = any(p.entry.span is not None for p in pieces)
            return not_compared("shape" if firm and kind in PARAMETERS and not flat else "unmapped", note, **common), []
        theirs = self.reference.array(target)
        if kind in GRADIENTS and self.assembler.gradient_scale != 1.0:
            full = from_float(as_float(full, target.dtype) / self.assembler.gradient_scale, target.dtype)
        sums = compare(full, theirs, target.dtype)
        allowed = self.reference.tolerance(key, sums, self.mode)
        if kind == "param_after" and sums.error > allowed.absolute and not sums.mismatch:
            sums = self._where_gradients_tell(key, full, theirs, sums)
            few = telling(as_float(full, target.dtype) - as_float(theirs, target.dtype))  # an update's error may sit in one element
            if sums.error > allowed.absolute and few < sums.n:
                allowed = self.reference.tolerance(key, msgspec.structs.replace(sums, n=few), self.mode)
        note = self._explain(key, full, theirs, sums, allowed.absolute, conflicts, pieces) if sums.error > allowed.absolute else ""
        found = judge(sums, allowed, **common, ranks=ranks, note=note)
        near = firm or (sums.relative < FITS and kind in ("output", "input"))  # no other place has values like these
        if failing(found) and (not near or (not sums.rounded and kind != "input")):
            found = msgspec.structs.replace(found, verdict="unmapped")
        if firm and sums.rounded and not failing(found) and (self.alone or target.dtype in SHORT):
            found = self._sloped(key, found, full, theirs)
        apart = [c for c in conflicts if c.rel * sums.size > allowed.absolute or not np.isfinite(c.rel)] if firm else []
        if not apart:
            return found, []
        wrong, worst = self._strays(pieces, theirs, allowed.absolute, kind)
        if wrong and not failing(found):
            note = f"not on {rank_text(wrong)}: replicas differ"
            found = judge(worst, allowed, **common, ranks=wrong, note=note)
        return found, [self._conflict(c, wrong, allowed.absolute / sums.size if sums.size else 0.0, common) for c in apart]

    def _explain(
        self, key: Key, full: Array, theirs: Array, sums: Difference, allowed: float, conflicts: Sequence[Conflict], pieces: Sequence[Piece]
    ) -> str:
        """In what way a tensor is wrong."""
        target = self.reference.entries[key]
        parts: list[Array] = []
        if conflicts and all(p.entry.shape == target.shape and p.entry.dtype == target.dtype for p in pieces):
            parts = [self.ranks[p.rank].array(p.entry) for p in pieces]
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

    def _strays(self, pieces: Sequence[Piece], theirs: Array, allowed: float, kind: str) -> tuple[list[int], Difference]:
        """Ranks whose own shard is not the reference's, and the worst difference."""
        wrong: list[int] = []
        worst: Difference | None = None
        for piece in pieces:
            if piece.places is None or piece.addend:
                continue
            mine = self.ranks[piece.rank].array(piece.entry)
            if kind in GRADIENTS and self.assembler.gradient_scale != 1.0:
                mine = from_float(as_float(mine, piece.entry.dtype) / self.assembler.gradient_scale, piece.entry.dtype)
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
            word, note, step=step, call=call, kind=kind, name=name, order=self._order(key), slot=slot, cls=target.cls, source=target.source
        )

    def _constant_in_flats(self, name: str) -> bool:
        """Whether optimizers of the candidate hold flat tensors, in which a parameter of one value cannot be found."""
        param = self.reference.entries.get((0, 0, "param", name, ""))
        return param is not None and _constant(self.reference.array(param)) and self._flat

    @functools.cached_property
    def _flat(self) -> bool:
        return any(e.span is not None for record in self.ranks.values() for e in record.entries)

    def _order(self, key: Key) -> float:
        return float(self.reference.entries[key].order)

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

    # -- gradients and recomputation ------------------------------------------------------------------------

    def _gradient_scale(self) -> float:
        """By what the candidate's gradients of activations differ as a whole: its loss may be an average over other parts.

        Read off the first gradient of the backward pass. Parameter gradients are compared as they are, so that a wrong
        scale of the loss is found there.
        """
        keys = sorted((k for k in self.reference.order if k[2] in GRADIENTS and k[0] == 0), key=lambda k: self.reference.entries[k].order)
        for key in keys[:8]:
            self.assembler.merge((*key[:2], LIKE[key[2]], *key[3:]))  # a gradient lies as its value does, and that has no scale
            merged = self.assembler.merge(key)
            if merged is None or merged[0] is None:
                continue
            full = merged[0]
            target = self.reference.entries[key]
            sums = compare(full, self.reference.array(target), target.dtype)
            if not sums.size or not np.isfinite(sums.error):
                continue
            alpha = sums.dot / sums.reference_sq
            cosine = sums.dot / np.sqrt(sums.candidate_sq * sums.reference_sq) if sums.candidate_sq else 0.0
            if cosine > 0.99 and abs(alpha - 1.0) > 1e-2:
                near = round(alpha) if alpha > 1 else 1.0 / round(1.0 / alpha)
                alpha = near if abs(alpha / near - 1.0) < 1e-3 else alpha
                self.notes.append(
                    f"the candidate's loss is scaled by {alpha:.4g} before its backward pass; gradients of activations are compared after "
                    "division by it, gradients of parameters as they are"
                )
                return float(alpha)
            if cosine > 0.99:
                return 1.0
        return 1.0

    def _recomputed(self) -> list[TensorVerdict]:
        """What recomputation gives must be what the first pass gave."""
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
                name = self._naming[rank](entry)
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


def _read_off(ranks: Mapping[int, RankRecord]) -> Plan | None:
    """What a framework said in every rank about how its model is cut, put together."""
    said = [record.info.plan for record in ranks.values()]
    if len(ranks) < 2 or not all(said):
        return None
    plans = [Plan.from_json(text) for text in dict.fromkeys(said)]
    whole = Plan(plans[0].mesh)
    for plan in plans:
        for rules, known in ((plan.params, whole.params), (plan.activations, whole.activations), (plan.renames, whole.renames)):
            for rule in rules:
                if rule not in known:
                    whole.add(rule)
    return whole if whole.mesh.world == len(ranks) else None


def _mesh_of_dtensors(ranks: Mapping[int, RankRecord]) -> Mesh | None:
    """The mesh that DTensors of the whole world name, so that axes can be called by it."""
    for record in ranks.values():
        for entry in record.entries:
            if entry.placement is not None:
                mesh = Mesh(entry.placement.axes, entry.placement.sizes)
                if mesh.world == len(ranks) and not any(a.startswith("mesh") for a in mesh.axes):
                    return mesh
    return None


def _constant(values: Array) -> bool:
    return values.size == 0 or bool((values == values.ravel()[0]).all())
