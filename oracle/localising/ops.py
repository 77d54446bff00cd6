"""Inside the module that is wrong: the first operation whose inputs are the reference's and whose result is not.

Both sides recorded the operations of one module under the same inputs (`collect/edges/ops.py`). The candidate has others than
the reference (slices, masks, collectives), so operations are matched by value: a result *fits* if it is some part of a
result of the reference, or a summand of one that the ranks add up. From the module's wrong value the candidate's data flow is
followed back to results that fit; the operation behind them is named. What depends on no input (masks, views of
parameters) is taken for right, and so is what fits nothing and has no wrong consequence. Beyond TTrace, which ends at the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.locate import locate
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tolerance import unit_roundoff
from proctor.oracle.store import RankRecord
from proctor.oracle.store.op_log import FILE, Op, read_log

Array = npt.NDArray[Any]

ROUNDINGS: Final = 32.0  # units of roundoff that an operation's result may differ by under the same inputs, in float32
ROUNDINGS_SHORT: Final = 8.0  # … in 16 bits, where 32 units would be an eighth of the value
SHARE: Final = 0.01  # of the module's own error: less than that upstream is not where it comes from
PHASES: Final = ("forward", "backward")


class Operation(NamedTuple):
    """The first operation that differs.

    Args:
        label: `aten.addmm`.
        source: `file:line`; "" where it has none.
        phase: `forward` or `backward`.
        shape: of its result on that rank.
        reference: shape of the reference's result; empty where it has no such operation.
        error: relative, of the closest part of it; infinite where nothing is comparable.
        ranks: on which it differs.
        note: in words.
    """

    label: str
    source: str
    phase: str
    shape: tuple[int, ...]
    reference: tuple[int, ...]
    error: float
    ranks: tuple[int, ...]
    note: str = ""

    def __str__(self) -> str:
        text = self.label.removeprefix("aten.")
        if self.phase == "backward":
            text += " in the backward pass"
        if self.source:
            text += f" ({'of ' if self.phase == 'backward' else ''}{self.source})"
        text += f", result {list(self.shape)}"
        if self.reference:
            text += f" of the reference's {list(self.reference)}" if self.reference != self.shape else ""
            text += f", off by {self.error:.2g}" if np.isfinite(self.error) else ""
        if self.note:
            text += f": {self.note}"
        return text


class Trace:
    """The operations of one rank, with their results.

    Args:
        record: of the run in which operations were recorded.

    Raises:
        OracleError: the file is damaged.
    """

    def __init__(self, record: RankRecord) -> None:
        self.record = record
        self.log = read_log(record.folder / FILE)
        self._entries: dict[int, list[Any]] = {}
        for entry in record.entries:
            if entry.kind == "op" and entry.name.isdecimal():
                self._entries.setdefault(int(entry.name), []).append(entry)

    def results(self, op: Op) -> Iterator[tuple[Array, str]]:
        """Floating-point results with torch's name of their type."""
        for entry in self._entries.get(op.number, ()):
            yield as_float(self.record.array(entry), entry.dtype), entry.dtype



def first_wrong(
    reference: Trace,
    candidate: Mapping[int, Trace],
    phase: str,
    *,
    coords: Mapping[int, Mapping[str, int]] | None = None,
    call: Callable[[int, int], int] = lambda rank, call: call,
    scale: float = 1.0,
) -> Operation | None:
    """The first operation of a module that gives another result than the reference's.

    Args:
        reference: of one rank.
        candidate: by rank; all under the reference's inputs.
        phase: which pass is looked at.
        coords: where ranks stand, to add up summands along one axis.
        call: of the reference that a rank's call is.
        scale: by which the candidate's gradients are larger.

    Returns:
        None where every value that leaves the module's own code fits, or nothing can be followed.
    """
    theirs = [op for op in reference.log.ops if op.phase == phase]
    factor = 1.0 / scale if phase == "backward" else 1.0
    found: list[tuple[_Rank, Op]] = []
    ranks = [_Rank(rank, trace, reference, theirs, phase, call, factor) for rank, trace in candidate.items()]
    _add_up(ranks, coords or {})
    for one in ranks:
        wrong = one.first_wrong()
        if wrong is not None:
            found.append((one, wrong))
    if not found:
        return None
    first = min(found, key=lambda f: f[1].number)
    same = tuple(sorted(one.rank for one, op in found if op.label == first[1].label and op.source == first[1].source))
    return first[0].describe(first[1], same)


class _Rank:
    """One rank's operations, matched with the reference's."""

    def __init__(
        self, rank: int, trace: Trace, reference: Trace, theirs: Sequence[Op], phase: str, call: Callable[[int, int], int], factor: float
    ) -> None:
        self.rank, self.trace, self.reference, self.theirs = rank, trace, reference, theirs
        self._call, self._factor = call, factor
        self.ops = [op for op in trace.log.ops if op.phase == phase]
        self.values: dict[int, list[Array]] = {}
        self.unit = 0.0
        for op in self.ops:
            for array, dtype in trace.results(op):
                self.values.setdefault(op.number, []).append(array * factor if factor != 1.0 else array)
                self.unit = max(self.unit, unit_roundoff(dtype))
        rounding = self.unit * (ROUNDINGS if self.unit < 2.0**-12 else ROUNDINGS_SHORT)
        self._sinks = {op.number: self._best(op, self._sinks_of(op))[0] for op in self.ops if op.what == "sink" and op.number in self.values}
        self.worst = max((e for e in self._sinks.values() if np.isfinite(e)), default=0.0)
        if any(not np.isfinite(e) for e in self._sinks.values()):
            self.worst = 1.0
        self.allowed = max(rounding, SHARE * min(self.worst, 1.0))
        self.fits: dict[int, int] = {}  # operation → the reference's
        self._computed = self._from_data()
        self.summands: set[int] = set()
        for op in self.ops:
            if op.number in self.values:
                error, other = self._best(op, self._alike(op))
                if error > self.allowed:
                    error, other = self._best(op, [o for o in self._of_call(op) if o.label != op.label or o.what != op.what])
                if other is not None and error <= self.allowed:
                    self.fits[op.number] = other.number

    def _from_data(self) -> set[int]:
        """Operations that depend on what came into the module; the others make constants, or views of parameters."""
        out: set[int] = set()
        for op in self.trace.log.ops:
            if op.what == "source" or not out.isdisjoint(op.inputs):
                out.add(op.number)
        return out

    def _of_call(self, op: Op) -> Iterator[Op]:
        call = self._call(self.rank, op.call)
        return (o for o in self.theirs if o.call == call)

    def _sinks_of(self, op: Op) -> list[Op]:
        return [o for o in self._of_call(op) if o.what == "sink"]

    def _alike(self, op: Op) -> list[Op]:
        return [o for o in self._of_call(op) if o.what == op.what and o.label == op.label]

    def _best(self, op: Op, others: Sequence[Op]) -> tuple[float, Op | None]:
        """How far all results of an operation are from the closest one of the reference's."""
        best: tuple[float, Op | None] = (float("inf"), None)
        for other in others:
            whole = [array for array, _ in self.reference.results(other)]
            error = max((_distance(mine, whole) for mine in self.values[op.number]), default=float("inf"))
            if error < best[0]:
                best = (error, other)
            if error == 0.0:
                break
        return best

    def close(self, array: Array, op: Op) -> Op | None:
        """The reference's operation of which an array is a result."""
        for other in self._of_call(op):
            if _distance(array, [a for a, _ in self.reference.results(other)]) <= self.allowed:
                return other
        return None

    def first_wrong(self) -> Op | None:
        """The operation behind the first value that leaves the module wrong."""
        sinks = [op for op in self.ops if op.what == "sink" and self._sinks.get(op.number, 0.0) > max(self.allowed, 0.1 * self.worst)]
        sink = next((op for op in sinks if op.number not in self.summands), None)
        if sink is None:
            return None
        front: list[Op] = []
        self._behind(sink, front, {})
        front = [op for op in front if op.what == "op"]
        if not front:  # a value that fits, in a place where it does not belong
            return next((self.trace.log.ops[i] for i in reversed(sink.inputs) if self.trace.log.ops[i].what == "op"), None)
        matched = set(self.fits.values())
        lost = {op.label for op in self.theirs if op.number not in matched}
        return min(front, key=lambda op: (op.label not in lost, op.number))

    def _behind(self, op: Op, front: list[Op], seen: dict[int, bool]) -> bool:
        """Collect what is wrong with only right inputs; returns whether there is anything wrong up to here."""
        stack = [(op, False)]
        while stack:
            at, done = stack.pop()
            if not done:
                if at.number in seen:
                    continue
                seen[at.number] = False
                right = at.what == "source" or at.number in self.summands or at.number not in self._computed
                if right or (at.number in self.fits and at is not op):
                    continue
                stack.append((at, True))
                stack += [(self.trace.log.ops[i], False) for i in at.inputs]
            else:
                behind = any(seen.get(i, False) for i in at.inputs)
                wrong = at.number in self.values
                if wrong and not behind:
                    front.append(at)
                seen[at.number] = wrong or behind
        return seen[op.number]

    def describe(self, op: Op, ranks: tuple[int, ...]) -> Operation:
        matched = set(self.fits.values())
        alike = [o for o in self._alike(op) if o.number not in matched and any(True for _ in self.reference.results(o))]
        error, other = self._best(op, alike) if op.number in self.values else (float("inf"), None)
        shape = tuple(op.shapes[0]) if op.shapes else ()
        theirs = tuple(other.shapes[0]) if other is not None and other.shapes else ()
        note = ""
        if op.number in self.fits:
            note = "its result is one of the reference's, and is used in another place"
        elif any(i in self.summands for i in op.inputs):
            note = "it reads a summand that the ranks have not added up"
        elif other is None:
            note = "the reference has no such operation here"
        return Operation(op.label, op.source, op.phase, shape, theirs, error, ranks, note)


def _add_up(ranks: Sequence[_Rank], coords: Mapping[int, Mapping[str, int]]) -> None:
    """Find results that are summands of the reference's: partial sums before a reduction."""
    for group in _groups(ranks, coords):
        places: dict[tuple[Any, ...], list[tuple[_Rank, Op]]] = {}
        for one in group:
            count: dict[tuple[str, str, int], int] = {}
            for op in one.ops:
                key = (op.what, op.label or f"{op.kind} {op.slot}", op.call)
                count[key] = count.get(key, 0) + 1
                places.setdefault((*key, count[key]), []).append((one, op))
        for held in places.values():
            open_ = [one.values[op.number][0] for one, op in held if op.number in one.values and op.number not in one.fits]
            if len(open_) != len(group) or len({a.shape for a in open_}) > 1 or len({a.tobytes() for a in open_}) < 2:
                continue
            total = np.sum([a.astype(np.float64) for a in open_], axis=0)
            if held[0][0].close(total, held[0][1]) is not None:
                for one, op in held:
                    if op.what != "sink":
                        one.summands.add(op.number)


def _groups(ranks: Sequence[_Rank], coords: Mapping[int, Mapping[str, int]]) -> Iterator[Sequence[_Rank]]:
    """All ranks, and those that differ in one coordinate only."""
    if len(ranks) < 2:
        return
    yield ranks
    axes = sorted({a for one in ranks for a in coords.get(one.rank, {})})
    for axis in axes:
        lines: dict[tuple[tuple[str, int], ...], list[_Rank]] = {}
        for one in ranks:
            lines.setdefault(tuple(sorted((a, i) for a, i in coords.get(one.rank, {}).items() if a != axis)), []).append(one)
        yield from (line for line in lines.values() if 1 < len(line) < len(ranks))


def _distance(mine: Array, theirs: Sequence[Array]) -> float:
    """Relative error of the closest part of one of several arrays."""
    best = float("inf")
    if not np.isfinite(mine).all():
        return best
    for whole in theirs:
        found = locate(mine, whole, padded=True)
        if found is not None and found.error < best:
            best = found.error
    return best
