"""Is the candidate the same computation as the reference? Every tensor, merged from its shards, against its tolerance.

First the reference against itself (is it deterministic, is it finite?), then whether both runs began alike, then the
replicas of the candidate among one another, then candidate against reference in the order of the reference's data flow.
Source: TTrace §4.4.

Where a tensor lies is known from the plan, from a DTensor, or by content (`locate.py`). A tensor whose place nobody
knows is *unmapped*: it is listed, it may be named as the place where a difference begins, and it never decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import MappingError, OracleError
from proctor.oracle._replicas import Conflict, Shard, agree, conflicts_of, same_bits
from proctor.oracle.align import PARAMETERS, Calls, Naming, count_calls, deal_calls, kept_names, name_tensors
from proctor.oracle.compare import Difference, compare
from proctor.oracle.dtypes import as_float, from_float, is_floating
from proctor.oracle.locate import FITS, Index, locate, take
from proctor.oracle.mesh import Layout, Mesh
from proctor.oracle.placements import from_dtensor
from proctor.oracle.plan import Plan
from proctor.oracle.store import Entry, RankRecord, Recording
from proctor.oracle.tolerance import Estimate, Mode, TensorKey, Tolerance, tolerance
from proctor.oracle.verdicts import (
    ReplicaConflict,
    TensorVerdict,
    Verdict,
    conclude,
    explain_difference,
    failing,
    flow,
    judge,
    not_compared,
)

Array = npt.NDArray[Any]
Key = tuple[int, int, str, str, str]  # step, call, kind, name, slot: of the reference

REPLICA_AXES: Final = ("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "dp_replicate_shard", "data", "zero")
GRADIENTS: Final = ("grad_input", "grad_output")
_RANKING: Final = {
    "param": 0, "input": 1, "output": 1, "scalar": 2, "grad_output": 3, "grad_input": 3, "main_grad": 4, "opt_state": 5, "param_after": 6,
}  # fmt: skip
LIKE: Final = {"main_grad": "param", "param_after": "param", "opt_state": "param", "grad_output": "output", "grad_input": "input"}


class Piece(NamedTuple):
    """A shard and where it lies."""

    rank: int
    entry: Entry
    places: Index | None
    label: str
    firm: bool


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
        self.plan = plan
        self.mode = mode
        self.reference = _Reference(reference)
        self.ranks = candidate.ranks(run)
        self.notes: list[str] = [f"candidate: {n}" for n in candidate.info.notes] + [f"reference: {n}" for n in reference.info.notes]
        self.unchecked: list[str] = []
        self.mesh = plan.mesh if plan is not None else Mesh()
        world = len(self.ranks)
        if plan is not None and plan.mesh.world != world:
            raise OracleError(
                f"the plan's mesh ({plan.mesh}) has {plan.mesh.world} ranks, the candidate ran with {world}", hint="change [mesh] sizes"
            )
        self.coords = {r: self._coords(r, record) for r, record in self.ranks.items()}
        self._naming: dict[int, Naming] = {}
        self._calls: dict[int, Calls] = {}
        self._counts: dict[int, dict[str, int]] = {}
        self._places: dict[tuple[Any, ...], tuple[Index, str]] = {}
        self._extents: dict[tuple[Any, ...], npt.NDArray[np.int64]] = {}
        self._pieces: dict[Key, list[tuple[int, Entry]]] = {}
        self.gradient_scale = 1.0
        self.layouts: dict[str, str] = {}

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
        self.gradient_scale = self._gradient_scale()
        for key in self.reference.order:
            verdict, conflicts = self._judge(key)
            if verdict is not None:
                tensors.append(verdict)
            replicas += conflicts
        tensors += self._recomputed()
        return self._conclude(tensors, replicas)

    def _conclude(self, tensors: list[TensorVerdict], replicas: list[ReplicaConflict]) -> Verdict:
        self.unchecked += self.reference.not_seen(set(self._pieces)) + sorted(self._extra)
        for t in tensors:
            if t.verdict == "unmapped":
                self.unchecked.append(f"{t.kind} {t.name}{_slot(t.slot)}: where its shards lie is not known; annotate it in a plan")
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
            yield key, [self._place(rank, entry, key, self.reference.entries[key]) for rank, entry in held]

    # -- before tensors are compared ------------------------------------------------------------------------

    def _coords(self, rank: int, record: RankRecord) -> dict[str, int]:
        if self.plan is not None:
            return self.mesh.coords(rank)
        return dict(record.info.coords)

    def _say_names(self) -> None:
        said: dict[str, list[int]] = {}
        for rank, naming in self._naming.items():
            for here, there in naming.prefixes.items():
                said.setdefault(f"{here or 'its modules'} → {there or 'the root'}", []).append(rank)
        for text, ranks in list(said.items())[:12]:
            self.notes.append(f"matched by content: {text} on {_ranks(ranks)}")

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
                    mine = self._slots(rank, entry)
                    if len(slots) == len(mine):
                        key = (entry.step, call, entry.kind, name, slots[mine.index(entry.slot)])
                if key in self.reference.entries:
                    self._pieces.setdefault(key, []).append((rank, entry))
                elif entry.kind in ("param", "output"):
                    self._extra.add(f"{entry.kind} {name}: the reference has none of this name")

    def _slots(self, rank: int, entry: Entry) -> list[str]:
        if not hasattr(self, "_slot_table"):
            self._slot_table: dict[tuple[int, int, int, str, str], list[str]] = {}
            for r, record in self.ranks.items():
                for e in record.entries:
                    if not e.recompute:
                        found = self._slot_table.setdefault((r, e.step, e.call, e.kind, e.name), [])
                        if e.slot not in found:
                            found.append(e.slot)
        return self._slot_table[rank, entry.step, entry.call, entry.kind, entry.name]

    def _deal(self, rank: int, record: RankRecord, naming: Naming) -> Calls:
        samples = []
        for entry in record.entries:
            if entry.step or entry.recompute or entry.kind not in ("input", "output") or entry.call > 1 or not entry.shape:
                continue
            name = naming(entry)
            full = {
                k[1]: self.reference.floats(e)
                for call in range(self.reference.calls.get(name, 0))
                if (k := (0, call, entry.kind, name, entry.slot)) in self.reference.entries
                for e in [self.reference.entries[k]]
                if len(e.shape) == len(entry.shape)
            }
            if len(full) > 1:
                samples.append((entry, as_float(record.array(entry), entry.dtype), full, self._counts[rank].get(name, 0)))
            if len(samples) >= 8:
                break
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
            merged = self._merge(key)
            if merged is None:
                continue
            full, _, pieces = merged
            theirs = self.reference.array(self.reference.entries[key])
            if full is None or not same_bits(np.ascontiguousarray(full), np.ascontiguousarray(theirs)):
                a, b = as_float(theirs, self.reference.entries[key].dtype), None if full is None else as_float(full, pieces[0].entry.dtype)
                if b is None or a.shape != b.shape or float(np.linalg.norm(a - b)) > 1e-3 * float(np.linalg.norm(a)):
                    off.append(key[3])
        if not off:
            return None
        share = len(off) / len(mine)
        names = ", ".join(off[:3]) + (f" and {len(off) - 3} more" if len(off) > 3 else "")
        return conclude(
            [],
            unchecked=self.unchecked,
            notes=self.notes,
            inconclusive=f"the two runs do not begin with the same parameters ({names}; {share:.0%} of them): "
            "record both with --generate, or say in a plan how they are cut",
        )

    # -- one tensor -----------------------------------------------------------------------------------------

    def _merge(self, key: Key) -> tuple[Array | None, list[Conflict], list[Piece]] | None:
        """The candidate's tensor; `None` where no rank has a shard of it."""
        held = self._pieces.get(key)
        if not held:
            return None
        target = self.reference.entries[key]
        pieces = [self._place(rank, entry, key, target) for rank, entry in held]
        if any(p.entry.span is not None for p in pieces):
            return self._merge_spans(key, target, pieces)
        if key[2] not in PARAMETERS and any(p.places is None or not p.firm for p in pieces):
            # The root of a pipeline stage is called like the model: its hidden states are none of the model's outputs.
            fitting = [p for p in pieces if p.places is not None and (p.firm or p.entry.shape == target.shape)]
            pieces = fitting if fitting else pieces
        if any(p.places is None for p in pieces):
            return None, [], pieces
        summed = self._summed(key, target, pieces)
        if summed is not None:
            return summed, [], [p._replace(label="partial sums", firm=False) for p in pieces]
        dtype = pieces[0].entry.dtype
        groups: dict[tuple[bytes, ...], list[Piece]] = {}
        for piece in pieces:
            assert piece.places is not None
            groups.setdefault(tuple(i.tobytes() for i in piece.places), []).append(piece)
        shards = [[self._shard(p) for p in group] for group in groups.values()]
        conflicts = conflicts_of(shards)
        first = shards[0][0].array
        full = np.zeros(target.shape, first.dtype)
        covered = np.zeros(target.shape, np.uint8) if len(groups) > 1 else None
        for group, members in zip(groups.values(), shards, strict=True):
            index = group[0].places
            assert index is not None
            where = np.ix_(*index) if index else ()
            full[where] = agree(members).array
            if covered is not None:
                covered[where] += 1
            elif first.shape != target.shape:
                return None, conflicts, pieces  # one part only: the others are missing
        if covered is not None and bool((covered != 1).any()):
            return None, conflicts, pieces
        return self._as(full, dtype, target.dtype), conflicts, pieces

    def _summed(self, key: Key, target: Entry, pieces: list[Piece]) -> Array | None:
        """The sum of what the ranks hold, where that is the reference's tensor and no single one is: partial sums."""
        if key[2] not in ("output", *GRADIENTS) or len(pieces) < 2 or not is_floating(target.dtype):
            return None
        if any(p.firm or p.entry.shape != target.shape for p in pieces):
            return None
        different: dict[bytes, Array] = {}
        for piece in pieces:
            values = self.ranks[piece.rank].array(piece.entry)
            different.setdefault(values.tobytes(), as_float(values, piece.entry.dtype).astype(np.float64))
        if len(different) < 2:
            return None
        theirs = self.reference.floats(target)
        total = np.asarray(sum(different.values()))
        if key[2] in GRADIENTS:
            theirs = theirs * self.gradient_scale
        size = float(np.linalg.norm(theirs))
        alone = min(float(np.linalg.norm(v - theirs)) for v in different.values())
        together = float(np.linalg.norm(total - theirs))
        return from_float(total, target.dtype) if together < 0.1 * alone and together < FITS * size else None

    def _shard(self, piece: Piece) -> Shard:
        return Shard(piece.rank, self.coords[piece.rank] or {"rank": piece.rank}, self.ranks[piece.rank].array(piece.entry), piece.entry.dtype)

    @staticmethod
    def _as(values: Array, dtype: str, wanted: str) -> Array:
        return values if dtype == wanted else from_float(as_float(values, dtype), wanted)

    def _merge_spans(self, key: Key, target: Entry, pieces: list[Piece]) -> tuple[Array | None, list[Conflict], list[Piece]]:
        """Flat shards of one parameter, each of a rank's local part."""
        like = (0, 0, "param", key[3], "")
        parts_by_rank: dict[int, Piece] = {}
        for rank, entry in self._pieces.get(like, []):
            parts_by_rank[rank] = self._place(rank, entry, like, self.reference.entries[like])
        total = np.zeros(target.shape, np.float64)
        covered = np.zeros(target.shape, np.int32)
        shards: dict[bytes, list[Shard]] = {}
        for piece in pieces:
            home = parts_by_rank.get(piece.rank)
            span = piece.entry.span
            if home is None or home.places is None or span is None:
                return None, [], pieces
            local = np.arange(int(np.prod(target.shape, dtype=np.int64))).reshape(target.shape)
            flat = take(local, home.places).ravel()[span[0] : span[1]]
            shards.setdefault(flat.tobytes(), []).append(self._shard(piece))
            total.ravel()[flat] = as_float(self.ranks[piece.rank].array(piece.entry), piece.entry.dtype)
        for raw in shards:
            covered.ravel()[np.frombuffer(raw, np.int64)] += 1
        if bool((covered != 1).any()):
            return None, [], pieces
        return from_float(total, target.dtype), conflicts_of(list(shards.values())), pieces

    def _place(self, rank: int, entry: Entry, key: Key, target: Entry) -> Piece:
        """Where a shard lies: by the plan, by its DTensor, or by content."""
        if entry.span is not None:
            return Piece(rank, entry, None, "flat", firm=True)
        for layout, mesh, coords, label in self._known(rank, entry, key):
            index = _indices(layout, mesh, coords, target.shape, entry.shape)
            if index is not None:
                return Piece(rank, entry, index, label, firm=True)
        pattern = (rank, LIKE.get(key[2], key[2]), re.sub(r"\d+", "#", key[3]), entry.slot if key[2] in ("input", "output", *GRADIENTS) else "",
                   entry.shape, target.shape, entry.call if target.shape != entry.shape else 0)
        known = self._places.get(pattern)
        if known is not None:
            return Piece(rank, entry, known[0], known[1], firm=True)
        if entry.shape == target.shape:
            index = tuple(np.arange(n, dtype=np.int64) for n in entry.shape)
            return Piece(rank, entry, index, "whole", firm=key[2] in PARAMETERS or key[2] == "scalar")
        if len(entry.shape) != len(target.shape):
            return Piece(rank, entry, None, "", firm=False)
        mine, theirs = as_float(self.ranks[rank].array(entry), entry.dtype), self.reference.floats(target)
        found = locate(mine / self.gradient_scale if key[2] in GRADIENTS else mine, theirs)
        if found is not None and found.sure:
            self._places[pattern] = (found.part.places, found.part.label)
            for whole, part, along in zip(target.shape, entry.shape, found.part.places, strict=True):
                for module in (_module(key), ""):
                    self._extents.setdefault((rank, entry.call, module, part, whole), along)
            return Piece(rank, entry, found.part.places, found.part.label, firm=True)
        # Values that say nothing (zeros), or that are wrong: as its neighbours of the same extents lie.
        for module in (_module(key), ""):
            held = [
                np.arange(part) if part == whole else self._extents.get((rank, entry.call, module, part, whole))
                for whole, part in zip(target.shape, entry.shape, strict=True)
            ]
            if all(h is not None for h in held):
                sure = key[2] in PARAMETERS and bool(module)
                return Piece(rank, entry, tuple(h for h in held if h is not None), "as its neighbours", firm=sure)
        return Piece(rank, entry, found.part.places if found is not None else None, found.part.label if found is not None else "", firm=False)

    def _known(self, rank: int, entry: Entry, key: Key) -> Iterator[tuple[Layout, Mesh, Mapping[str, int], str]]:
        kind = key[2]
        if entry.placement is not None:
            mesh, layout, _ = from_dtensor(msgspec.to_builtins(entry.placement))
            position = self._placement_coords(rank, mesh)
            yield layout, mesh, position, str(layout)
        if self.plan is None:
            return
        name = key[3]
        if kind in PARAMETERS:
            found = self.plan.param_layout(name)
        else:
            found = self.plan.activation_layout(name, kind, entry.slot)
        if found is None:
            return
        layout = found.on(self.mesh)
        yield layout, self.mesh, self.coords[rank], str(layout)
        # Replicas that are calls of the reference are no cut of its tensors.
        rest = Layout(tuple(c for c in layout.cuts if not set(c.axis.split("+")) & set(REPLICA_AXES)))
        if rest != layout and self._calls[rank].ratio > 1:
            yield rest, self.mesh, self.coords[rank], str(rest)

    def _placement_coords(self, rank: int, mesh: Mesh) -> Mapping[str, int]:
        """Where a rank stands on a DTensor's mesh: a mesh of its own, or one that the whole world shares."""
        coords = self.coords[rank] or self.ranks[rank].info.coords
        if all(a in coords for a in mesh.axes):
            return {a: coords[a] for a in mesh.axes}
        return mesh.coords(rank % mesh.world)

    def _judge(self, key: Key) -> tuple[TensorVerdict | None, list[ReplicaConflict]]:
        target = self.reference.entries[key]
        step, call, kind, name, slot = key
        if kind == "scalar" and name == "loss":
            return None, []  # what is averaged over what is the program's business: gradients tell whether it is right
        if kind == "param" and step == 0:
            merged = self._merge(key)
            return (None, []) if merged is not None else (self._missing(key, target), [])
        merged = self._merge(key)
        if merged is None:
            return (self._missing(key, target) if kind in ("main_grad", "param_after") else None), []
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
        if kind in GRADIENTS and self.gradient_scale != 1.0:
            full = from_float(as_float(full, target.dtype) / self.gradient_scale, target.dtype)
        sums = compare(full, theirs, target.dtype)
        allowed = self.reference.tolerance(key, sums, self.mode)
        note = explain_difference(full, theirs, target.dtype, kind, allowed.absolute, difference=sums) if sums.error > allowed.absolute else ""
        found = judge(sums, allowed, **common, ranks=ranks, note=note)
        near = firm or (sums.relative < FITS and kind in ("output", "input"))  # no other place has values like these
        if failing(found) and (not near or (not sums.rounded and kind != "input")):
            found = msgspec.structs.replace(found, verdict="unmapped")
        apart = [c for c in conflicts if c.rel * sums.size > allowed.absolute or not np.isfinite(c.rel)] if firm else []
        return found, [self._conflict(c, allowed.absolute / sums.size if sums.size else 0.0, common) for c in apart]

    def _missing(self, key: Key, target: Entry) -> TensorVerdict:
        step, call, kind, name, slot = key
        words = {
            "param": "the candidate has no such parameter",
            "main_grad": "no optimizer of the candidate took a gradient of it",
        }
        note = words.get(kind, "the candidate has none")
        return not_compared(
            "missing", note, step=step, call=call, kind=kind, name=name, order=self._order(key), slot=slot, cls=target.cls, source=target.source
        )

    def _order(self, key: Key) -> float:
        return float(self.reference.entries[key].order)

    def _conflict(self, conflict: Conflict, allowed: float, common: Mapping[str, Any]) -> ReplicaConflict:
        where = f"along {conflict.axis}" if conflict.axis not in ("", "rank") else f"between ranks {', '.join(map(str, conflict.ranks))}"
        return ReplicaConflict(
            **{k: v for k, v in common.items() if k != "layout"},
            axis=conflict.axis,
            ranks=conflict.minority,
            majority=conflict.majority,
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
            merged = self._merge(key)
            if merged is None or merged[0] is None:
                continue
            full = merged[0]
            target = self.reference.entries[key]
            sums = compare(np.ascontiguousarray(full), np.ascontiguousarray(self.reference.array(target)), target.dtype)
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


class _Reference:
    """The trusted side: its tensors by key, its repetition, its noise samples."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ranks = recording.ranks()
        self.samples = [recording.ranks(name) for name in recording.noise()]
        self.again = recording.ranks("again") if "again" in recording.runs() else None
        self.entries: dict[Key, Entry] = {}
        self.owner: dict[Key, int] = {}
        self.notes: list[str] = []
        self._floats: dict[int, Array] = {}
        for rank, record in self.ranks.items():
            for entry in record.entries:
                if not entry.recompute:
                    key = (entry.step, entry.call, entry.kind, entry.name, entry.slot)
                    if key not in self.entries:
                        self.entries[key], self.owner[key] = entry, rank
        self._by_entry = {id(e): self.owner[k] for k, e in self.entries.items()}
        self.order = sorted(self.entries, key=lambda k: (k[0], _RANKING.get(k[2], 9), self.owner[k], self.entries[k].order))
        self.last = max((e.order for e in self.entries.values()), default=0)
        self.calls: dict[str, int] = {}
        for step, call, kind, name, _ in self.entries:
            if step == 0 and kind in ("input", "output"):
                self.calls[name] = max(self.calls.get(name, 0), call + 1)
        self.slots: dict[tuple[int, int, str, str], list[str]] = {}
        for step, call, kind, name, slot in self.order:
            self.slots.setdefault((step, call, kind, name), []).append(slot)
        self._others: list[dict[Key, Entry]] = [_keyed(s) for s in self.samples]
        self._estimate = Estimate()

    def array(self, entry: Entry) -> Array:
        return self.ranks[self._by_entry[id(entry)]].array(entry)

    def floats(self, entry: Entry) -> Array:
        return as_float(self.array(entry), entry.dtype)

    def parameters(self) -> dict[str, tuple[Entry, Any]]:
        """Parameters before the first step, with how to read them."""
        return {k[3]: (e, self.array) for k, e in self.entries.items() if k[2] == "param" and k[0] == 0}

    def problem(self, mode: Mode) -> str:
        """Why it cannot be trusted; "" when it can."""
        if not self.samples:
            return "the reference was recorded without noise samples, so no tolerance is known: record it with --samples 4"
        for key in self.order:
            entry = self.entries[key]
            if is_floating(entry.dtype) and key[2] != "input" and bool(np.isnan(self.floats(entry)).any()):
                return f"the reference itself has NaN in {key[2]} {key[3]}{_slot(key[4])}: nothing can be compared with it"
        if self.again is None:
            self.notes.append("the reference was recorded once only: whether it is deterministic was not checked")
            return ""
        again = _keyed(self.again)
        rough = 0
        for key in self.order:
            entry, other = self.entries[key], again.get(key)
            if other is None:
                return f"the reference is not deterministic: its second run has no {key[2]} {key[3]}"
            a, b = self.array(entry), self.again[self.owner[key]].array(other)
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"the reference is not deterministic: {key[2]} {key[3]} has another shape in its second run"
            if same_bits(a, b):
                continue
            sums = compare(np.ascontiguousarray(b), np.ascontiguousarray(a), entry.dtype) if is_floating(entry.dtype) else None
            if sums is None or sums.error > self.tolerance(key, sums, mode).absolute:
                return (
                    f"the reference is not deterministic: {key[2]} {key[3]}{_slot(key[4])} differs between two runs of it "
                    "by more than rounding (unseeded data, dropout or initialisation?)"
                )
            rough += 1
        if rough:
            self.notes.append(f"the reference is not deterministic bit for bit ({rough} tensors differ within their tolerance)")
        return ""

    def tolerance(self, key: Key, difference: Difference, mode: Mode) -> Tolerance:
        """What a tensor may differ by, from the noise samples."""
        entry, place = self.entries[key], TensorKey(*key)
        if place not in self._estimate:
            mine = np.ascontiguousarray(self.array(entry))
            for sample, (ranks, keyed) in enumerate(zip(self.samples, self._others, strict=True)):
                other = keyed.get(key)
                if other is not None and other.shape == entry.shape and other.dtype == entry.dtype:
                    moved = np.ascontiguousarray(ranks[self.owner[key]].array(other))
                    self._estimate.add(place, sample, compare(moved, mine, entry.dtype), entry.dtype)
        fp8 = "float8_e4m3fn" if entry.fp8 else ""
        signal = None
        before = (key[0], 0, "param", key[3], "") if key[2] == "param_after" else None
        if before is not None and before in self.entries and self.entries[before].shape == entry.shape:
            signal = compare(np.ascontiguousarray(self.array(entry)), np.ascontiguousarray(self.array(self.entries[before])), entry.dtype).error
        found = self._estimate.tolerance(place, difference, entry.dtype, fp8=fp8, signal=signal)
        return found if found is not None else tolerance(0.0, difference.size, entry.dtype, key[2], n=difference.n, mode=mode, fp8=fp8)

    def not_seen(self, seen: set[Key]) -> list[str]:
        """Modules of the reference that the candidate has no tensor of."""
        have = {k[3] for k in seen if k[2] == "output"}
        mine = sorted({k[3] for k in self.entries if k[2] == "output"} - have)
        return [f"module {name or '(root)'}: the candidate has none of this name" for name in mine]


def _keyed(ranks: Mapping[int, RankRecord]) -> dict[Key, Entry]:
    out: dict[Key, Entry] = {}
    for record in ranks.values():
        for e in record.entries:
            if not e.recompute:
                out.setdefault((e.step, e.call, e.kind, e.name, e.slot), e)
    return out


def _indices(layout: Layout, mesh: Mesh, coords: Mapping[str, int], whole: Sequence[int], local: Sequence[int]) -> Index | None:
    try:
        index = tuple(layout.indices(whole, mesh, coords))
    except (MappingError, OracleError):
        return None
    return index if tuple(len(i) for i in index) == tuple(local) else None


def _module(key: Key) -> str:
    """Of which module a tensor is, layers alike."""
    path = key[3].rpartition(".")[0] if key[2] in PARAMETERS else key[3]
    return re.sub(r"\d+", "#", path) or "."


def _constant(values: Array) -> bool:
    return values.size == 0 or bool((values == values.ravel()[0]).all())


def _slot(slot: str) -> str:
    return f"[{slot}]" if slot else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{'…' if len(ranks) > 8 else ''}"
