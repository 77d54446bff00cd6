"""Only forwards: a trainer against the engine that generates for it. Weights are compared at the start and after each synchronisation.

Nothing is trained, so weights that differ are no reason to give up, as they are before a training step, but what is looked for. The
engine may hold them in a shorter type: then they must be the reference's, rounded to it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.statistics import FORWARDS_NOT_SEEN
from proctor.oracle.judging.statistics import note as how_small
from proctor.oracle.judging.verdicts import (
    ReplicaConflict,
    TensorVerdict,
    Verdict,
    Word,
    conclude,
    explain_difference,
    failing,
    judge,
    not_compared,
)
from proctor.oracle.merging.reference import Key
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating
from proctor.oracle.numbers.tolerance import Mode, tolerance
from proctor.oracle.phases.evaluation import judge_evaluations
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import Recording
from proctor.oracle.tensors import FORWARD

_SIZES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes of an element: every number of a shorter type is one of a longer


class ForwardComparison(Comparison):
    """Two recordings of forwards alone."""

    def run(self) -> Verdict:
        """Compare weights, then forwards."""
        said = self.prepare()
        if said is not None:
            return said
        tensors: list[TensorVerdict] = []
        replicas: list[ReplicaConflict] = []
        for key in self.reference.order:
            if key[2] == "param":
                verdict, apart = self._weight(key)
                tensors.append(verdict)
                replicas += apart
        lost = {t.step for t in tensors if t.verdict == "missing"} - {0}
        for step in sorted(lost):
            if all(t.verdict == "missing" for t in tensors if t.step == step):
                tensors = [t for t in tensors if t.step != step]
                self.unchecked.append(f"weights of step {step}: the candidate's do not change so often")
        evaluated = judge_evaluations(self)
        tensors += evaluated.tensors
        replicas += evaluated.replicas
        for t in tensors:
            if t.verdict == "unmapped" and t.kind == "weight":
                self.unchecked.append(f"{t.kind} {t.name}: {t.note or 'where its shards lie is not known'}; annotate it in a plan")
        self.unchecked += evaluated.unchecked
        self.notes += evaluated.notes
        if self.reference.recording.info.statistics:
            self.notes.append(how_small(self.reference))
            self.unchecked.append(FORWARDS_NOT_SEEN)
        forwards = any(t.phase and t.kind != "weight" for t in tensors)
        lacking = "" if forwards or any(map(failing, tensors)) or replicas else "no forward of the candidate could be compared"
        found = conclude(tensors, replicas, unchecked=self.unchecked, notes=self.notes, inconclusive=lacking)
        compared = len({t.step for t in found.tensors})
        reason = f"{found.reason}; forwards alone, {compared} version{'s' if compared != 1 else ''} of the weights"
        return msgspec.structs.replace(found, reason=reason, steps=(compared, self.reference.recording.info.steps))

    def _start(self) -> Verdict | None:
        return None  # weights that differ are what is looked for

    def _weight(self, key: Key) -> tuple[TensorVerdict, list[ReplicaConflict]]:
        """A parameter as a version of the weights has it."""
        target = self.reference.entries[key]
        common: dict[str, Any] = {"step": key[0], "call": 0, "kind": "weight", "phase": FORWARD, "name": key[3], "cls": target.cls, "source": target.source, "order": float(target.order)}
        merged = self.assembler.merge(key)
        if merged is None:
            return _without("missing", "the candidate has no such parameter", common), []
        if merged.full is None:
            shapes = ", ".join(str(list(p.entry.shape)) for p in merged.pieces[:4])
            placed = all(p.places is not None for p in merged.pieces)
            return _without("shape" if placed else "unmapped", f"its shards {shapes} do not make up {list(target.shape)}", common), []
        theirs = self._as_kept(key, merged.pieces[0].entry.precision)
        if theirs is None:
            return _without("unmapped", f"its sums are of {merged.pieces[0].entry.precision}, and the reference's of {target.precision} alone", common), []
        sums = compare(np.ascontiguousarray(merged.full), np.ascontiguousarray(theirs), target.dtype)
        allowed = tolerance(0.0, sums.size, target.dtype, "param", n=sums.n, mode=self.mode, copied=True)
        note = explain_difference(merged.full, theirs, target.dtype, "param", allowed.absolute, difference=sums, earlier=self._before(key)) if sums.error > allowed.absolute else ""
        ranks = sorted({p.rank for p in merged.pieces})
        found = judge(sums, allowed, **{k: v for k, v in common.items() if k != "phase"}, ranks=ranks, layout="; ".join(sorted({p.label for p in merged.pieces})[:4]), note=note)
        found = msgspec.structs.replace(found, phase=FORWARD)
        apart = [
            ReplicaConflict(
                kind="weight", phase=FORWARD, name=key[3], axis=c.axis, ranks=c.minority, majority=c.majority, rel_err=c.rel, step=key[0], cls=target.cls, source=target.source,
                order=float(target.order), note=f"replicas of the weight differ on {rank_text(sorted(c.ranks))}",
            )
            for c in merged.conflicts
        ]  # fmt: skip
        return found, apart

    def _as_kept(self, key: Key, own: str) -> np.ndarray[Any, Any] | None:
        """The reference's weight as one has it that keeps it in a type of its own; `None` where sums of that were not recorded."""
        target = self.reference.entries[key]
        theirs = self.reference.array(target)
        if own == target.precision or not (is_floating(own) and is_floating(target.precision)):
            return theirs
        if not target.tile:
            return from_float(as_float(from_float(as_float(theirs, target.dtype), own), own), target.dtype)
        if _SIZES.get(own, 0) > _SIZES.get(target.precision, 8):
            return theirs  # nothing is rounded
        rounded = self.reference.entries.get((*key[:2], "param_as", key[3], own))
        return self.reference.array(rounded) if rounded is not None and rounded.tile == target.tile else None

    def _before(self, key: Key) -> dict[str, np.ndarray[Any, Any]]:
        """The same weight before the last synchronisation, which may have left it out."""
        before = self.reference.entries.get((key[0] - 1, *key[1:])) if key[0] else None
        return {"the version before": self.reference.array(before)} if before is not None else {}


def _without(word: Word, note: str, common: dict[str, Any]) -> TensorVerdict:
    """The verdict of a weight that could not be compared."""
    said = not_compared(word, note, **{k: v for k, v in common.items() if k != "phase"})
    return msgspec.structs.replace(said, phase=common["phase"])


def comparison_of(reference: Recording, candidate: Recording, plan: Plan | None, mode: Mode) -> Comparison:
    """The comparison that two recordings ask for.

    Raises:
        OracleError: only one of them is of forwards alone.
    """
    if reference.info.forward != candidate.info.forward:
        which = "reference" if reference.info.forward else "candidate"
        raise OracleError(f"only the {which} was recorded with --forward", hint="record both alike")
    return (ForwardComparison if reference.info.forward else Comparison)(reference, candidate, plan, mode)
