"""Is the candidate the same computation as the reference? What is compared with what, in which order, and what follows.

First the reference against itself (is it deterministic, is it finite?), then whether both runs began alike, then the
candidate's tensors, one by one (`tensor_judge.py`), in the order of the reference's data flow. Source: TTrace §4.4.

Where a tensor lies is known from the plan, from a DTensor, or by content (`locate.py`). A tensor whose place nobody
knows is *unmapped*: it is listed, it may be named as the place where a difference begins, and it never decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.judging.beginning import Beginning
from proctor.oracle.judging.buffers import Buffers
from proctor.oracle.judging.choices import Choices, digest_of, undecided
from proctor.oracle.judging.dropouts import HIDDEN, Dropouts
from proctor.oracle.judging.holders import Holders, averaged_later, of_other_rows
from proctor.oracle.judging.rows import Rows, Scattered
from proctor.oracle.judging.scalars import judge_scalars
from proctor.oracle.judging.stages import Stages
from proctor.oracle.judging.statistics import NOT_SEEN, Statistics
from proctor.oracle.judging.statistics import note as how_small
from proctor.oracle.judging.tensor_judge import TensorJudge
from proctor.oracle.judging.verdicts import (
    COMPARED,
    ReplicaConflict,
    TensorVerdict,
    Verdict,
    conclude,
    failing,
    first_of,
    may_begin,
)
from proctor.oracle.merging import padding
from proctor.oracle.merging.align import (
    BUFFERS,
    PARAMETERS,
    Calls,
    Naming,
    count_calls,
    deal_calls,
    kept_names,
    name_tensors,
    within,
)
from proctor.oracle.merging.assemble import GRADIENTS, LIKE, REPLICA_AXES, Assembler, Piece
from proctor.oracle.merging.reference import Key, Reference, slot_text
from proctor.oracle.merging.said import mesh_of_dtensors, read_off
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tolerance import Mode
from proctor.oracle.plans.mesh import Mesh, rank_text
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import CLEAN, EAGER, PLACED, REPLAYED, RankRecord, Recording
from proctor.oracle.tensors import DRAWN, Entry, later

SAMPLED_TENSORS: Final = 4
SAMPLED_CALLS: Final = 4


class Comparison:
    """One reference against one candidate.

    Args:
        reference: recorded with samples.
        candidate: what is judged.
        plan: how the candidate lies on its mesh; what it does not say is found by content.
        mode: `all` (noise everywhere, M = 3) or `paper` (noise on the input, M = 5).
        theirs: run of the reference; "" the one that is trusted.
        run: of the candidate; `forced` is that of `localise`, "" the one with the reference's choices where there is one.
    """

    def __init__(
        self, reference: Recording, candidate: Recording, plan: Plan | None = None, mode: Mode = "all", run: str = "", theirs: str = ""
    ) -> None:
        self.reference, self.candidate = Reference(reference, theirs), candidate
        if not run:
            replayed = REPLAYED in candidate.runs() and candidate.info.replayed == digest_of(self.reference)
            run = REPLAYED if replayed else CLEAN
        self.ranks, self.run_name = candidate.ranks(run), run
        plan = plan if plan is not None else read_off(self.ranks)
        self.plan = plan
        self.mode = mode
        self.notes: list[str] = [f"candidate: {n}" for n in candidate.info.notes] + [f"reference: {n}" for n in reference.info.notes]
        self.unchecked: list[str] = []
        self.mesh = plan.mesh if plan is not None else Mesh()
        world = len(self.ranks)
        if plan is not None and plan.mesh.axes and plan.mesh.world != world:
            raise OracleError(
                f"the plan's mesh ({plan.mesh}) has {plan.mesh.world} ranks, the candidate ran with {world}", hint="change [mesh] sizes"
            )
        self._named = mesh_of_dtensors(self.ranks)
        self.coords = {r: self._coords(r, record) for r, record in self.ranks.items()}
        self._naming: dict[int, Naming] = {}
        self._calls: dict[int, Calls] = {}
        self._counts: dict[int, dict[str, int]] = {}
        self._pieces: dict[Key, list[tuple[int, Entry]]] = {}
        self.assembler = Assembler(self.reference, self.ranks, self.coords, self._calls, plan, self._pieces)
        self.choices = Choices(self.reference, self.assembler, replayed=run not in (CLEAN, EAGER))
        self._dropout = (reference.info.dropout, candidate.info.dropout)
        self.alone = run == "forced"

    # -- the whole ------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Compare everything.

        Raises:
            OracleError: the recordings cannot be compared at all.
        """
        if different := self.prepare():
            return different
        from proctor.oracle.phases.evaluation import judge_evaluations  # it compares as this does
        tensors: list[TensorVerdict] = []
        replicas: list[ReplicaConflict] = []
        self._find_gradient_scales()
        self._allow_casts()
        for key in self.reference.order:
            verdict, conflicts = self._tensors.judge(key)
            if verdict is not None:
                tensors.append(Statistics(self.reference, self.assembler).judge(key, verdict))
            replicas += conflicts
        tensors += [*self.choices.judge(), *self._dropouts().judge(), *judge_scalars(self.reference, self.assembler)]
        self.unchecked += self.choices.unchecked
        tensors += self._tensors.recomputed(self._naming)
        buffers = Buffers(self.reference, self.assembler, self._counts, self.mode).judge()
        late, held = Holders(self.reference, self.assembler).judge()
        tensors += [*buffers.tensors, *late]
        said = {(r.step, r.kind, r.name) for r in replicas}
        replicas += [*self._apart, *buffers.replicas, *(r for r in held if (r.step, r.kind, r.name) not in said)]
        self.unchecked += [*buffers.unchecked, *self._tensors.unchecked]
        evaluated = judge_evaluations(self)
        self._not_seen(tensors)
        if self.reference.recording.info.statistics:
            self.notes.append(how_small(self.reference))
            self.unchecked.append(NOT_SEEN)
        self.notes += evaluated.notes
        self.unchecked += [text for text in evaluated.unchecked if text.partition(": ")[2] not in self.unchecked]
        if not self.alone:  # there the optimizer takes the reference's gradients, and parameters say nothing of the candidate's
            tensors, replicas, said_of = averaged_later(tensors, replicas, self.assembler.alike_after)
            self.unchecked += said_of
        return self._conclude([*tensors, *evaluated.tensors], [*replicas, *evaluated.replicas])

    def prepare(self) -> Verdict | None:
        """Find out what is what; a verdict where that shows already that nothing can be said."""
        unusable = self.reference.problem(self.mode) if self.reference.run != PLACED else ""
        if unusable:
            return conclude([], notes=self.notes, inconclusive=unusable)
        self.notes += self.reference.notes
        parameters = self.reference.parameters()
        taken = set().union(*(kept_names(parameters, record, self.plan, self.coords[rank]) for rank, record in self.ranks.items()))
        for rank, record in self.ranks.items():
            self._naming[rank] = name_tensors(parameters, record, self.plan, self.coords[rank], taken)
        self._say_names()
        self._index()
        self._rows = Rows(self.reference, self.ranks, lambda rank, entry: self._naming[rank](entry))
        self._tensors = TensorJudge(self.reference, self.assembler, Scattered(self._rows, self.assembler), self.mode, alone=self.alone)
        return self._start() or self._dropped_alike()

    def _dropouts(self) -> Dropouts:
        return Dropouts(self.reference, self.assembler, lambda rank, path: self._naming[rank].module(path), self._counts)

    def _allow_casts(self) -> None:
        """Casts to 8 bits get their own tolerance only where the first of them falls out otherwise than in the reference.

        A candidate that scales as the reference does makes the same casts; later differences are then no matter of scales.
        """
        key = self.reference.first_cast()
        if key is None:
            return
        self.reference.allow_fp8(False)
        found, _ = self._tensors.judge(key)
        same = found is not None and not failing(found) and found.verdict != "unmapped"
        self.reference.allow_fp8(not same)
        self.notes.append(
            "8-bit casts agree with the reference's at first, so tolerances leave no room for other scales"
            if same
            else "8-bit casts fall out otherwise than in the reference from the first on; tolerances leave room for that"
        )

    def _not_seen(self, tensors: Sequence[TensorVerdict]) -> None:
        self.unchecked += self.reference.not_seen(set(self._pieces), self.compiled()) + sorted(self._extra)
        for t in tensors:
            if t.verdict == "unmapped":
                self.unchecked.append(f"{t.kind} {t.name}{slot_text(t.slot)}: where its shards lie is not known; annotate it in a plan")

    def _conclude(self, tensors: list[TensorVerdict], replicas: list[ReplicaConflict]) -> Verdict:
        self.notes += padding.notes(self.assembler)
        wanted = any(k[2] == "main_grad" for k in self.reference.order)
        judged = any(t.kind == "main_grad" and t.verdict != "unmapped" for t in tensors)
        lacking = "no gradient of the candidate could be compared" if wanted and not judged else ""
        if not self.choices.replayed and not replicas:
            lacking = lacking or undecided(self.choices.parted, [t for t in tensors if failing(t)])
        found = self._with_steps(conclude(tensors, replicas, unchecked=self.unchecked, notes=self.notes, inconclusive=lacking))
        if found.verdict != "different":
            return found
        # A tensor that nobody has placed never decides, but a difference may begin in it; not beside rows that were placed.
        failing_ = [t for t in tensors if failing(t) or (may_begin(t) and not self._rows.placed(t.step, t.name))]
        return msgspec.structs.replace(found, first=first_of(failing_) if found.first is not None else None)

    def _with_steps(self, found: Verdict) -> Verdict:
        """Say how many steps were compared: what begins later is not seen."""
        compared = len({t.step for t in found.tensors if t.verdict in COMPARED})
        asked = max(self.reference.recording.info.steps, self.candidate.info.steps)
        said = f"{compared} of {asked} recorded steps compared" if asked > 1 else "the first step compared" if compared else ""
        reason = f"{found.reason}; {said}, later ones were not looked at" if said else found.reason
        whole = set(self.reference.recording.info.whole) & set(self.candidate.info.whole)
        if asked > 1 and whole and compared > 1:
            shown = ", ".join(map(str, sorted(whole)))
            found = msgspec.structs.replace(found, unchecked=(*found.unchecked, f"activations and optimizer state of all steps but {shown}: only parameters, gradients, buffers and numbers"))
        return msgspec.structs.replace(found, reason=reason, steps=(compared, asked))

    def shards(self) -> Iterator[tuple[Key, list[Piece]]]:
        """The candidate's shards of each tensor of the reference, with their places; after `run`."""
        for key in self._pieces:
            yield key, self.assembler.placed(key)

    def compiled(self) -> list[str]:
        """Modules that the candidate compiles, as the reference calls them, outer ones first; after `run`."""
        return sorted({self._naming[rank].module(path) for rank, record in self.ranks.items() for path in record.info.compiled})

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
        return self._call(rank, module, call)

    # -- before tensors are compared ------------------------------------------------------------------------

    def _coords(self, rank: int, record: RankRecord) -> dict[str, int]:
        if self.plan is not None and self.mesh.axes:
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
            self._counts[rank] = self._count(record, naming)
        stages = Stages(self.reference)
        for rank, record in self.ranks.items():
            naming = self._naming[rank]
            self._calls[rank] = self._deal(rank, record, naming)
            held = {naming(e).rpartition(".")[0] for e in record.entries if e.kind == "param" and e.step == 0 and e.name not in naming.unused}
            for entry in record.entries:
                if entry.recompute or (entry.kind in PARAMETERS and entry.name in naming.unused):
                    continue
                name = naming(entry)
                call = entry.call
                if entry.kind not in PARAMETERS and entry.kind not in BUFFERS:
                    call = self._call(rank, name, call)
                key = (entry.step, call, entry.kind, name, entry.slot)
                if key not in self.reference.entries:
                    slots = self.reference.slots.get((entry.step, call, entry.kind, name), ())
                    mine = self._slots[rank, entry.step, entry.call, entry.kind, entry.name]
                    if len(slots) == len(mine):
                        key = (entry.step, call, entry.kind, name, slots[mine.index(entry.slot)])
                if key in self.reference.entries and not stages.foreign(name, entry.kind, held):
                    self._pieces.setdefault(key, []).append((rank, entry))
                elif entry.kind in ("param", "output") and key not in self.reference.entries:
                    self._extra.add(f"{entry.kind} {name}: the reference has none of this name")
        if self.reference.recording.info.world > 1 and (other := of_other_rows(self._pieces, self.reference.calls)):
            self._extra.add(f"gradients at the edges of {len({k[3] for k in other})} modules: the candidate calls them less often than the reference's ranks, on other rows")
            for key in other:
                del self._pieces[key]

    def _call(self, rank: int, module: str, call: int) -> int:
        mine, theirs = self._counts[rank], self.reference.calls
        return self._calls[rank].of(call, mine.get(module, 0), theirs.get(module, 0), within(module, mine, theirs))

    def _count(self, record: RankRecord, naming: Naming) -> dict[str, int]:
        return count_calls(record.entries, naming, 0)

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
                samples.append((entry, as_float(record.array(entry), entry.dtype), full, self._counts[rank].get(name, 0), within(name, self._counts[rank], self.reference.calls)))
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
        self._apart = Holders(self.reference, self.assembler).begin_apart()
        begun = Beginning(self.reference, self.assembler)
        if not begun.otherwise:
            return None
        if begun.miscut:
            return conclude(begun.miscut, self._apart, unchecked=self.unchecked, notes=self.notes)
        found = conclude([], self._apart, unchecked=self.unchecked, notes=self.notes, inconclusive=begun.reason())
        return msgspec.structs.replace(found, alike=False)

    def _dropped_alike(self) -> Verdict | None:
        """Dropout must have been recorded in the same way on both sides."""
        dropouts = self._dropouts()
        theirs, mine = (word or "draw" for word in self._dropout)
        if theirs != mine and dropouts.active() and self.reference.run != PLACED:
            word = f"dropout was recorded with --dropout {theirs} in the reference and {mine} in the candidate"
            return conclude([], unchecked=self.unchecked, notes=self.notes, inconclusive=f"{word}: record both alike")
        if theirs not in ("draw", *DRAWN) and (kept := dropouts.kept(HIDDEN) if theirs == "replay" else dropouts.kept()):
            self.unchecked.append(f"dropout masks of {kept} module{'s' if kept > 1 else ''}: everything is kept while it is recorded; probabilities are compared")
        return None

    def _find_gradient_scales(self) -> None:
        back = [k for k in self.reference.order if k[2] in GRADIENTS and k[0] == 0]
        for number in sorted({later(k[4]) for k in back}):
            found = self._gradient_scale([k for k in back if later(k[4]) == number])
            if found is not None:
                self.assembler.gradient_scales[number] = found

    def _gradient_scale(self, keys: Sequence[Key]) -> float | None:
        """By what the candidate's gradients of activations differ as a whole: its loss may be an average over other parts.

        Read off the first gradient of the backward pass. Parameter gradients are compared as they are, so that a wrong
        scale of the loss is found there.
        """
        for key in sorted(keys, key=lambda k: self.reference.entries[k].order)[:8]:
            self.assembler.merge((*key[:2], LIKE[key[2]], *key[3:]))  # a gradient lies as its value does, and that has no scale
            merged = self.assembler.merge(key)
            if merged is None or merged[0] is None:
                continue
            full = merged[0]
            target = self.reference.entries[key]
            sums = compare(full, self.reference.array(target), target.dtype)
            if not sums.size or not np.isfinite(sums.error) or sums.n < 2:  # a loss's own gradient is 1 whatever it is averaged over
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
        return None
