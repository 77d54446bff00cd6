"""Buffers that a step changes: running statistics, codebooks, counters. Every rank that holds one must hold the reference's.

What no step changes is a constant: of a rank's own making as often as not (masks, offsets of its shard), and what it does is seen in
activations. A constant that is another one is listed and does not decide. Neither do statistics of a rank that sees a part of the reference's microbatches only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict, judge
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.merging.replicas import same_bits
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.tolerance import Mode
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.tensors import Entry


class Found(NamedTuple):
    """What is said of buffers."""

    tensors: list[TensorVerdict]
    replicas: list[ReplicaConflict]
    unchecked: list[str]


class Buffers:
    """Buffers of a candidate and of a reference.

    Args:
        reference: that is trusted.
        assembler: of the candidate; knows who holds what.
        counts: by rank, how often it called each module of the reference in a step.
        mode: of tolerances.
    """

    def __init__(self, reference: Reference, assembler: Assembler, counts: Mapping[int, Mapping[str, int]], mode: Mode) -> None:
        self.reference, self._pieces, self._ranks, self._counts, self._mode = reference, assembler.pieces, assembler.ranks, counts, mode

    def judge(self) -> Found:
        """Compare those that a step changed; name the others that are not alike."""
        found = Found([], [], self._constants())
        for step in range(self.reference.recording.info.steps):
            for name in sorted({k[3] for side in (self.reference.entries, self._pieces) for k in side if k[0] == step and k[2] == "buffer_after"}):
                self._changed(step, name, found)
        return found

    def _constants(self) -> list[str]:
        changing = {k[3] for side in (self.reference.entries, self._pieces) for k in side if k[2] == "buffer_after"}
        out = []
        for key in (k for k in self.reference.order if k[2] == "buffer" and k[3] not in changing):
            theirs = self.reference.array(self.reference.entries[key])
            other = [rank for rank, e in self._pieces.get(key, ()) if not same_bits(self._ranks[rank].array(e), theirs)]
            if other:
                out.append(f"buffer {key[3]}: {rank_text(other)} begins with another one than the reference's, which no step changes")
        return out

    def _changed(self, step: int, name: str, found: Found) -> None:
        key = (step, 0, "buffer_after", name, "")
        held, theirs = dict(self._pieces.get((0, 0, "buffer", name, ""), [])), self._after(step, name)
        if theirs is None or not held:
            found.unchecked.append(f"buffer {name}: the {'reference' if theirs is None else 'candidate'} has none of this name")
            return
        module = name.rpartition(".")[0]
        calls = self.reference.calls.get(module, 0)
        if any(self._counts[rank].get(module, calls) != calls for rank in held):
            found.unchecked.append(f"buffer {name}: each rank's is made of other microbatches than the reference's")
            return
        values = self.reference.array(theirs)
        mine = {rank: self._mine(rank, step, name, entry) for rank, entry in held.items()}
        if any(e.shape != theirs.shape or e.dtype != theirs.dtype for e in mine.values()):
            found.unchecked.append(f"buffer {name}: it has another shape or type than the reference's")
            return
        sums = {rank: compare(self._ranks[rank].array(e), values, theirs.dtype) for rank, e in mine.items()}
        place = key if key in self.reference.entries else (theirs.step, 0, theirs.kind, name, "")
        worst = max(sums.values(), key=lambda d: d.error if d.rounded else float(d.unequal))
        allowed = self.reference.tolerance(place, worst, self._mode)
        wrong = [rank for rank, d in sums.items() if d.mismatch or _size(d) > allowed.absolute]
        note = ""
        if wrong:
            still = [r for r in wrong if self._stays(r, step, name, held[r])]
            note = "the step does not change it" if still and key in self.reference.entries else ""
            note = "the reference does not change it" if key not in self.reference.entries else note
            note = f"{note} on {rank_text(still or wrong)}" if note and len(held) > 1 else note
        order = self._order(step, module, theirs)
        found.tensors.append(
            judge(worst, allowed, step=step, call=0, kind="buffer_after", name=name, cls=theirs.cls, source=theirs.source,
                  ranks=wrong or sorted(held), layout="whole", order=order, note=note)
        )  # fmt: skip
        if wrong and len(wrong) < len(held):
            found.replicas.append(
                ReplicaConflict(
                    kind="buffer_after", name=name, axis="rank", ranks=tuple(wrong), majority=tuple(r for r in held if r not in wrong), step=step,
                    cls=theirs.cls, source=theirs.source, rel_err=worst.relative, order=order, note="the buffer is the reference's on some ranks only",
                )
            )  # fmt: skip

    def _after(self, step: int, name: str) -> Entry | None:
        """The reference's buffer after a step: the last that was recorded."""
        return next((e for e in _last(step, name, lambda k: self.reference.entries.get(k))), None)

    def _mine(self, rank: int, step: int, name: str, first: Entry) -> Entry:
        return next(_last(step, name, lambda k: next((e for r, e in self._pieces.get(k, ()) if r == rank), None)), first)

    def _stays(self, rank: int, step: int, name: str, first: Entry) -> bool:
        return not any(r == rank for r, _ in self._pieces.get((step, 0, "buffer_after", name, ""), ()))

    def _order(self, step: int, module: str, entry: Entry) -> float:
        at = [e.order for k, e in self.reference.entries.items() if k[0] == step and k[2] == "output" and k[3] == module]
        return float(max(at, default=entry.order))


def _last(step: int, name: str, find: Callable[[Key], Entry | None]) -> Iterator[Entry]:
    keys: Sequence[Key] = [*((s, 0, "buffer_after", name, "") for s in range(step, -1, -1)), (0, 0, "buffer", name, "")]
    return (e for key in keys if (e := find(key)) is not None)


def _size(d: Difference) -> float:
    return d.error if d.rounded else float(d.unequal)
