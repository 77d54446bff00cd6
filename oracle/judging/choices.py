"""Does the candidate choose what the reference chooses: experts by a router's scores, the greatest of some numbers?

Near a tie rounding decides, and everything after it is another computation. So choices are compared by themselves: another one is
allowed only where the reference's own scores prefer its choice by less than rounding moves them. And they are
replayed: noise samples are given the choices of the reference's first run, a candidate whose choices fell out otherwise
runs again with those of the reference, cut as its scores are. Source: findings §3 (tolerances after a router were eight times narrower).

A choice along a dimension that is cut is another choice, and not compared; nor is one whose scores nobody has placed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import TensorVerdict, flow, not_compared
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.locate import FITS, Index, take
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tolerance import MULTIPLE, WARN, unit_roundoff
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry, key_of

Array = npt.NDArray[Any]
Values = dict[int, dict[str, Array]]  # by rank, and as `key_of` calls them

UNORDERED: Final = ("topk",)  # which, and not in what order
FAR: Final = 1e300  # an index that the reference does not have


class Part(NamedTuple):
    """A rank's part of a choice.

    Args:
        rank: that made it.
        entry: of its record; the last dimension is that along which is chosen.
        places: of its rows among the reference's.
    """

    rank: int
    entry: Entry
    places: Index


class Choices:
    """Choices of a candidate beside those of a reference.

    Args:
        reference: whose choices are right.
        assembler: knows where the candidate's scores lie.
        replayed: the candidate was given the reference's choices, so each of its own follows from right ones before it.
    """

    def __init__(self, reference: Reference, assembler: Assembler, *, replayed: bool) -> None:
        self.reference, self.assembler, self.replayed = reference, assembler, replayed
        self.unchecked: list[str] = []
        self.parted: TensorVerdict | None = None  # the first choice that fell out otherwise, within rounding

    def keys(self) -> list[Key]:
        """All choices of the reference, in the order of its dataflow."""
        return [k for k in self.reference.order if k[2] == "choice"]

    def judge(self) -> list[TensorVerdict]:
        """A verdict on each choice that can be compared; choices after one that fell out otherwise follow from that."""
        out: list[TensorVerdict] = []
        skipped, unknown = 0, dict[str, None]()
        for key in self.keys():
            if self.parted is not None and not self.replayed:
                skipped += 1
                continue
            found = self._judge(key)
            if found is None:
                if key in self.assembler.pieces and not self._cut(key):
                    unknown[f"routing {key[4]} of {key[3] or 'the model'}: where its scores lie is not known"] = None
                continue
            out.append(found)
            if found.verdict in ("ok", "warn") and found.rel_err > 0 and self.parted is None:
                self.parted = found
        self.unchecked += unknown
        if skipped:
            self.unchecked.append(f"{skipped} choices that follow from one that fell out otherwise")
        return out

    def differ(self) -> bool:
        """Whether the candidate chooses anything else than the reference."""
        return any(
            not np.array_equal(self._own(part), self._theirs(key, part))
            for key in self.keys()
            for part in self.parts(key) or ()
        )

    def values(self, trusted: Reference | None = None) -> Iterator[tuple[int, str, Array]]:
        """What each rank is to choose: (rank, key, indices). All ranks that take part in a choice, or none of them.

        Args:
            trusted: another run of the reference, whose choices are taken.
        """
        rejected = {(k[3], k[4]) for k in self.keys() if k in self.assembler.pieces and self.parts(k) is None}
        for key in self.keys():
            if (key[3], key[4]) in rejected:
                continue
            for part in self.parts(key) or ():
                call = part.entry.call + self.assembler.ranks[part.rank].dry.get(key[0], 0)
                name = key_of(key[0], "choice", part.entry.name, part.entry.slot, call)
                if trusted is None or key in trusted.entries:
                    yield part.rank, name, np.ascontiguousarray(self._theirs(key, part, trusted))

    def parts(self, key: Key) -> list[Part] | None:
        """The candidate's parts of a choice, where all of them are placed and of the reference's form."""
        of_scores: Key = (key[0], key[1], "score", key[3], key[4])
        target, scores = self.reference.entries[key], self.reference.entries.get(of_scores)
        if scores is None:
            return None
        made = {(rank, e.call, e.name, e.slot): e for rank, e in self.assembler.pieces.get(of_scores, [])}
        out: list[Part] = []
        for rank, entry in self.assembler.pieces.get(key, []):
            mine = made.get((rank, entry.call, entry.name, entry.slot))
            places = placed(self.assembler, rank, mine, of_scores) if mine is not None else None
            if mine is None or places is None or mine.shape[-1] != scores.shape[-1] or entry.shape != (*mine.shape[:-1], target.shape[-1]):
                return None
            out.append(Part(rank, entry, places[:-1]))
        return out or None

    def _cut(self, key: Key) -> bool:
        """Whether ranks choose among a part of what the reference chooses among."""
        of_scores: Key = (key[0], key[1], "score", key[3], key[4])
        scores = self.reference.entries.get(of_scores)
        return scores is not None and any(e.shape[-1] != scores.shape[-1] for _, e in self.assembler.pieces.get(of_scores, []))

    def _own(self, part: Part) -> Array:
        return self.assembler.ranks[part.rank].array(part.entry)

    def _theirs(self, key: Key, part: Part, trusted: Reference | None = None) -> Array:
        reference = trusted or self.reference
        whole = reference.array(reference.entries[key])
        return take(whole, (*part.places, np.arange(whole.shape[-1], dtype=np.int64)))

    def _judge(self, key: Key) -> TensorVerdict | None:
        parts = self.parts(key)
        if parts is None:
            return self._otherwise(key)
        of_scores: Key = (key[0], key[1], "score", key[3], key[4])
        scores = self.reference.entries[of_scores]
        whole = self.reference.floats(scores)
        finite = np.abs(whole[np.isfinite(whole)])
        room = self.reference.largest(of_scores)
        allowed = MULTIPLE["all"] * max(room, unit_roundoff(scores.dtype) * float(finite.max(initial=0.0)))
        gaps = np.full(scores.shape[:-1], -1.0)  # -1 where nobody has the row, or all choose alike
        ranks: set[int] = set()
        for part in parts:
            rows = take(whole, (*part.places, np.arange(whole.shape[-1], dtype=np.int64)))
            off = gaps_of(rows, self._own(part), self._theirs(key, part), ordered=not key[4].startswith(UNORDERED))
            where = np.ix_(*part.places) if part.places else ()
            gaps[where] = np.maximum(gaps[where], off)
            if bool((off > allowed).any()):
                ranks.add(part.rank)
        other, wrong = int((gaps >= 0).sum()), int((gaps > allowed).sum())
        worst = float(gaps.max(initial=0.0)) if other else 0.0
        ratio = worst / allowed if allowed > 0 else (np.inf if worst > 0 else 0.0)
        note = ""
        if other:
            note = f"{wrong or other} of {gaps.size} choices fall out otherwise; the reference prefers its own by up to {worst:.3g}, rounding is {allowed:.3g}"
        target = self.reference.entries[key]
        return TensorVerdict(
            step=key[0], call=key[1], kind="choice", name=key[3], slot=key[4], cls=target.cls, source=target.source,
            rel_err=other / max(1, gaps.size), abs_err=worst, tolerance=allowed, ratio=ratio,
            verdict="bad" if wrong else "warn" if ratio > WARN else "ok",
            ranks=tuple(sorted(ranks or {p.rank for p in parts})), order=float(target.order), note=note,
        )  # fmt: skip

    def _otherwise(self, key: Key) -> TensorVerdict | None:
        """A choice of another number of entries, from scores that are the reference's."""
        of_scores: Key = (key[0], key[1], "score", key[3], key[4])
        target, scores = self.reference.entries[key], self.reference.entries.get(of_scores)
        made = {(rank, e.call): e for rank, e in self.assembler.pieces.get(of_scores, [])}
        for rank, entry in self.assembler.pieces.get(key, []):
            mine = made.get((rank, entry.call))
            places = placed(self.assembler, rank, mine, of_scores) if scores is not None and mine is not None else None
            if mine is None or places is None:
                return None
            if entry.shape[:-1] == mine.shape[:-1] and entry.shape[-1] != target.shape[-1]:
                note = f"{entry.shape[-1]} of {mine.shape[-1]} are chosen, the reference chooses {target.shape[-1]}"
                return not_compared(
                    "shape", note, step=key[0], call=key[1], kind="choice", name=key[3], order=float(target.order),
                    slot=key[4], cls=target.cls, source=target.source,
                )  # fmt: skip
        return None


def placed(assembler: Assembler, rank: int, mine: Entry, key: Key) -> Index | None:
    """Where a rank's part of a tensor lies: known for sure, or nearly the reference's there; not of a padded one."""
    target = assembler.reference.entries[key]
    piece = assembler.place(rank, mine, key, target)
    if piece.places is None or piece.addend or piece.kept is not None:
        return None
    if piece.firm:
        return piece.places
    own = as_float(assembler.ranks[rank].array(mine), mine.dtype)
    theirs = take(assembler.reference.floats(target), piece.places)
    with np.errstate(invalid="ignore"):
        off = np.where(own == theirs, 0.0, own - theirs)  # -inf masks what must not be chosen
        size = np.where(np.isfinite(theirs), theirs, 0.0)
    return piece.places if float(np.linalg.norm(off.ravel())) <= FITS * float(np.linalg.norm(size.ravel())) else None


def gaps_of(scores: Array, own: Array, theirs: Array, *, ordered: bool) -> Array:
    """By how much scores prefer one choice over another; -1 where both are the same.

    Args:
        scores: of shape (…, E), of the reference.
        own, theirs: indices of shape (…, k): the candidate's and the reference's.
        ordered: it matters which comes first.

    Returns:
        of shape (…).
    """
    if not ordered:
        same = (np.sort(own, -1) == np.sort(theirs, -1)).all(-1)
    else:
        same = (own == theirs).all(-1)
    known = ((own >= 0) & (own < scores.shape[-1])).all(-1)
    a = np.take_along_axis(scores, np.clip(own, 0, scores.shape[-1] - 1), -1)
    b = np.take_along_axis(scores, theirs, -1)
    if not ordered:
        a, b = np.sort(a, -1), np.sort(b, -1)
    with np.errstate(invalid="ignore"):
        off = np.abs(np.where(a == b, 0.0, a.astype(np.float64) - b)).max(-1, initial=0.0)
    return np.where(same, -1.0, np.where(known, np.nan_to_num(off, nan=FAR, posinf=FAR), FAR))


def undecided(parted: TensorVerdict | None, tensors: list[TensorVerdict]) -> str:
    """Why nothing can be said of runs that chose otherwise near a tie, and differ only after it; "" where something can."""
    if parted is None or not tensors or any(flow(t) <= flow(parted) for t in tensors):
        return ""
    rows = f"choice {parted.slot} of {parted.name or 'the model'}"
    return f"{rows} fell out otherwise than in the reference, within rounding, and all that differs comes after it: replay the reference's choices (--command)"


def write_own(ranks: Mapping[int, RankRecord], folder: Path) -> int:
    """Write what a run chose, for further runs of the same program; returns how many choices."""
    values: Values = {rank: {} for rank in ranks}
    for rank, record in ranks.items():
        for e in record.entries:
            if e.kind == "choice":
                call = e.call + record.dry.get(e.step, 0)
                values[rank][key_of(e.step, "choice", e.name, e.slot, call)] = np.ascontiguousarray(record.array(e))
    return _write(values, folder)


def write_values(found: Iterable[tuple[int, str, Array]], ranks: Iterable[int], folder: Path, own: Callable[[Values], Values] = lambda values: values) -> int:
    """Write for every rank of the candidate what it is given, under the names that `own` gives; returns how much."""
    values: Values = {rank: {} for rank in ranks}
    for rank, name, array in found:
        values[rank][name] = array
    return _write(own(values), folder)


def _write(values: Mapping[int, dict[str, Array]], folder: Path) -> int:
    count = sum(map(len, values.values()))
    if not count:
        return 0
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for rank, arrays in values.items():
        save_file(arrays, str(folder / f"rank{rank}.safetensors"))
    return count


def digest_of(reference: Reference) -> str:
    """Of all choices and masks of a reference: those that a candidate was given may be another one's."""
    out = hashlib.blake2b(digest_size=8)
    for key in sorted(k for k in reference.entries if k[2] in ("choice", "mask")):
        out.update(msgspec.json.encode(key) + reference.array(reference.entries[key]).tobytes())
    return out.hexdigest()
