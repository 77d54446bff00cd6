"""What a window of a run looks like, as keys: windows with equal keys differ in numbers, norms and times only.

Training repeats itself. A relation that reads no numbers says of a window what it said of one with the same calls in the
same order, the same contexts (but for the number of the step), and fingerprints that are equal where those were equal. Numbers
that a call was given or gave back, and sizes of tensors, count for those that say so only (`Relation.measures`): a schedule is
asked for another learning rate in each step, and batches of text have lengths of their own.

A step is looked at once, when it is over; a window's key is put together from the looks of its steps and from which of their
fingerprints are equal, so that no window is made of records when nothing in it is new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from proctor.invariants.codec import signature
from proctor.invariants.relations import Reads
from proctor.invariants.schema import Name, Value
from proctor.invariants.trace.grouping import Array, Rows, are_first, classes, pairs, pick
from proctor.invariants.trace.windows import PROLOGUE, Window
from proctor.verify.live.records import LiveTrace
from proctor.verify.live.rows import by_process

_RANDOM: Final = np.isin(np.arange(256), [int(kind) for kind in (Value.BATCH, Value.SAMPLE, Value.DRAW, Value.RNG)])
_NUMBERS: Final = np.array([int(Value.NUMBER), int(Value.OPTION)])
_OLDER: Final = -1 << 30  # place of what is older than a window
_LATER: Final = 1 << 24  # place of a window's last step
_NONE: Final = np.uint32(1 << 31)  # no call, or one without a row
_USUAL: Final = 16  # steps of windows that come again and again


class _Prints(NamedTuple):
    """Fingerprints of a step: each once, in the order in which they are seen, and a digest of which ones are equal."""

    distinct: Array
    classes: bytes


_OWN: Final = np.uint64(0x9E3779B97F4A7C15)  # makes equal fingerprints of two processes different

Kind = Literal["own", "records", "draws"]
"""Which fingerprints are compared: those of one process, those of all, those of batches and random states, too."""


@dataclass
class _Look:
    """What one step looks like.

    calls, states, values, draws: digests of the rows, sequence numbers counted from the first call of the step.
    given: functions of the calls, their arguments and results.
    base: that call's, by process, 0 without one; begin: the least of them.
    items: the least number of values at each place.
    fps: fingerprints of states and values, and those of batches and random states.
    procs: of which processes the former are.
    """

    calls: bytes
    states: bytes
    base: Array
    fps: tuple[Array, Array]
    procs: Array
    given: tuple[Array, ...] = ()
    values: bytes = b""
    draws: bytes = b""
    items: dict[int, int] = field(default_factory=dict)
    seen: dict[Kind, _Prints] = field(default_factory=dict)
    measured: dict[frozenset[str], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = self.base[self.base > 0]
        self.begin = int(told.min()) if len(told) else 1 << 32

    def prints(self, kind: Kind) -> _Prints:
        """Its fingerprints, as far as they are compared."""
        if kind not in self.seen:
            fps = np.concatenate(self.fps) if kind == "draws" else self.fps[0]
            if kind == "own":
                fps = fps ^ (self.procs.astype(np.uint64) + np.uint64(1)) * _OWN
            first = classes(fps)
            distinct = fps[first == np.arange(len(fps))]
            self.seen[kind] = _Prints(distinct, hashlib.blake2b(first.data, digest_size=16).digest())
        return self.seen[kind]

    def measure(self, functions: frozenset[str], codes: Mapping[str, int]) -> bytes:
        """Digest of what these functions were given and gave back."""
        if functions not in self.measured:
            digest = hashlib.blake2b(digest_size=16)
            if self.given:
                fns, *sides = self.given
                mine = np.isin(fns, [codes[name] for name in functions if name in codes])
                _take(digest, *(side[mine] for side in sides))
            self.measured[functions] = digest.digest()
        return self.measured[functions]


class Looks:
    """Keys of windows of a run that goes on.

    Args:
        live: its records.
    """

    def __init__(self, live: LiveTrace) -> None:
        self._live = live
        self._of: dict[int, tuple[int, _Look]] = {}  # by step: revision, look
        self._version = -1  # of the records that these are of
        self._fronts: dict[int, tuple[Rows, _Look]] = {}  # by length of the windows that they are before
        self._outlines = _Outlines(live)

    def key(self, window: Window, reads: Reads, *, alone: bool = False, measures: frozenset[str] = frozenset()) -> bytes:
        """Digest of all that relations may depend on that say so (`Relation.reads`), but for calls that have not returned.

        Args:
            window: of the run, with `now`.
            reads: not `numbers`.
            alone: which fingerprints of a process are those of another does not matter (`Relation.alone`).
            measures: functions whose numbers matter (`Relation.measures`).
        """
        self._refresh()
        now, start = window.now, max(window.first - window.reach, PROLOGUE)
        steps = [step for step in sorted(self._live.revisions) if step <= now and (step < PROLOGUE or step >= start)]
        looks = [(_OLDER, self._older(start, now - start))]
        looks += [(step if step < PROLOGUE else step - now + _LATER, self._look(step)) for step in steps]
        records, draws = reads != "calls", reads == "draws"
        kind: Kind = "draws" if draws else "own" if alone else "records"
        digest = hashlib.blake2b(self._live.roster(window.first - window.reach), digest_size=16)
        for at, (place, look) in enumerate(looks):
            digest.update(place.to_bytes(8, "little", signed=True) + look.calls)
            if records:
                digest.update(look.states + look.values + look.prints(kind).classes)
            if draws:
                digest.update(look.draws)
            if measures:
                digest.update(look.measure(measures, self._live.codes(Name.FUNCTION)))
            if at > 1 and place - looks[at - 1][0] == 1:
                digest.update(_shift(looks[at - 1][1], look, items=records))
        if records:
            prints = [look.prints(kind).distinct for _, look in looks]
            digest.update(np.array([len(one) for one in prints]).data)
            digest.update(classes(np.concatenate(prints)).data)
        return digest.digest()

    def _refresh(self) -> None:
        """Forget looks of steps that are not held, and of those since one that got rows."""
        if self._version == self._live.version:
            return
        self._version, held = self._live.version, self._live.revisions
        late = min((step for step, (revision, _) in self._of.items() if held.get(step, revision) != revision), default=1 << 30)
        self._of = {step: found for step, found in self._of.items() if step < late and step in held}

    def _look(self, step: int) -> _Look:
        found = self._of.get(step)
        if found is None:
            found = self._of[step] = self._live.revisions[step], self._make(step)
        return found[1]

    def _make(self, step: int) -> _Look:
        live, size = self._live, len(self._live.order)
        came = (live.rows_of(table, step) for table in ("calls", "states", "values"))
        calls, states, values = (None if rows is None else by_process(rows) for rows in came)
        base = _bases(size, [rows for rows in (values, states, calls) if rows is not None])
        of_calls = hashlib.blake2b(digest_size=16)
        if calls is not None:
            procs, seq, parent = (calls[c] for c in ("proc", "seq", "parent"))
            begin = base[procs]
            known = (parent >= begin) | self._held(step, procs, parent, begin)
            _take(of_calls, procs, seq - begin, np.where(known, parent - begin, _NONE))
            _take(of_calls, *(calls[c] for c in ("_look", "fn", "site", "flags")))
            for side in ("args", "ret"):
                _take(of_calls, self._outlines.of(calls[side]), classes(calls[side].astype(np.uint64)))
        told, rest = _split(values)
        look = self._digest(of_calls, states, told, rest, base)
        look.given = () if calls is None else tuple(calls[c] for c in ("fn", "args", "ret"))
        look.values, look.items = _values(told, base, step)
        look.draws, _ = _values(rest, base, step)
        return look

    def _digest(self, calls: hashlib.blake2b, states: Rows | None, told: Rows | None, rest: Rows | None, base: Array) -> _Look:
        """A look that lacks what is said of values."""
        of_states = hashlib.blake2b(digest_size=16)
        if states is not None:
            procs, variables, metas = (states[c] for c in ("proc", "var", "meta"))
            held = are_first(pairs(classes(pairs(procs, variables)), metas))
            _take(calls, procs[held], variables[held], metas[held])
            _take(of_states, procs, *(_counted(states[c], base[procs]) for c in ("seq", "call")))
            _take(of_states, *(states[c] for c in ("_look", "edge", "var", "meta", "flags")))
        fps, procs = (_column([states, told], name) for name in ("fp", "proc"))
        return _Look(calls.digest(), of_states.digest(), base, (fps, _column([rest], "fp")), procs)

    def _held(self, step: int, procs: Array, parents: Array, begin: Array) -> Array:
        """Of parents from before a step, those whose rows are held."""
        found = np.zeros(len(parents), dtype=bool)
        far = np.flatnonzero((parents > 0) & (parents < begin))
        if len(far):
            keys = pairs(procs[far], parents[far])
            wanted, inverse = np.unique(keys, return_inverse=True)
            mine = np.zeros(len(wanted), dtype=bool)
            latest = int(wanted.astype(np.uint32).max())
            size = len(self._live.order)
            later = {before for before, (_, look) in self._of.items() if latest < look.begin and len(look.base) == size}
            for before in [before for before in self._live.revisions if before < step and before not in later]:
                rows = self._live.rows_of("calls", before)
                if rows is not None:
                    mine |= np.isin(wanted, pairs(rows["proc"], rows["seq"]))
            found[far] = mine[inverse]
        return found

    def _older(self, start: int, length: int) -> _Look:
        """The last states from before a step, as one look."""
        states = self._live.older(start)
        found = self._fronts.get(length)
        if found is not None and found[0] is states:
            return found[1]
        base = np.zeros(len(self._live.order), dtype=np.uint32)
        none = np.zeros(len(states["seq"]), dtype=np.uint32)
        still = {**states, "seq": none, "call": none}
        look = self._digest(hashlib.blake2b(digest_size=16), still, None, None, base)
        if length <= _USUAL:
            self._fronts[length] = states, look
        return look


class _Outlines:
    """What signatures say but for numbers, as codes."""

    def __init__(self, live: LiveTrace) -> None:
        self._live = live
        self._known: dict[str, int] = {}
        self._of = np.zeros(256, dtype=np.uint32)
        self._size = 0

    def of(self, signatures: Array) -> Array:
        texts = self._live.texts(Name.SIGNATURE)
        if len(texts) > len(self._of):
            self._of = np.concatenate([self._of, np.zeros(len(texts), dtype=np.uint32)])
        for code in range(self._size, len(texts)):
            self._of[code] = self._known.setdefault(signature.outline(texts[code]), len(self._known))
        self._size = len(texts)
        found: Array = self._of[signatures]
        return found


def _take(digest: hashlib.blake2b, *columns: Array) -> None:
    for column in columns:
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(column).data)


def _column(parts: Sequence[Rows | None], name: str) -> Array:
    """This column of all of these."""
    return np.concatenate([np.zeros(0, dtype=np.uint64), *(rows[name] for rows in parts if rows is not None)])


def _bases(size: int, parts: Sequence[Rows]) -> Array:
    """The least sequence number of each process, in the last of these (sorted by process) that has rows of it."""
    base = np.zeros(size, dtype=np.uint32)
    for rows in parts:
        procs = rows["proc"]
        starts = np.flatnonzero(np.diff(procs, prepend=-1))
        base[procs[starts]] = np.minimum.reduceat(rows["seq"], starts)
    return base


def _counted(numbers: Array, base: Array) -> Array:
    """Sequence numbers from the first of the step; 0 means none."""
    counted: Array = np.where(numbers > 0, numbers - base, _NONE)
    return counted


def _split(values: Rows | None) -> tuple[Rows | None, Rows | None]:
    """What is sent, saved or changed, and what is random."""
    if values is None:
        return None, None
    random = _RANDOM[values["kind"]]
    masks = (~random & ~np.isin(values["kind"], _NUMBERS), random)
    told, rest = (pick(values, mine) if mine.any() else None for mine in masks)
    return told, rest


def _values(values: Rows | None, base: Array, step: int) -> tuple[bytes, dict[int, int]]:
    """Digest of values, and the least number at each place; numbers of later steps are counted from it, as calls are numbered on."""
    if values is None:
        return b"", {}
    digest = hashlib.blake2b(digest_size=16)
    procs, places, items = (values[c] for c in ("proc", "place", "item"))
    least: dict[int, int] = {}
    if step >= PROLOGUE:
        which, inverse = np.unique(places, return_inverse=True)
        lowest = np.full(len(which), np.iinfo(np.int32).max, dtype=np.int32)
        np.minimum.at(lowest, inverse, items)
        least = dict(zip(which.tolist(), lowest.tolist(), strict=True))
        items = np.where(items < 0, items, items - np.maximum(lowest, 0)[inverse])
    _take(digest, procs, items, _counted(values["seq"], base[procs]))
    _take(digest, *(values[c] for c in ("_look", "kind", "place", "meta", "flags")))
    return digest.digest(), least


def _shift(before: _Look, look: _Look, *, items: bool) -> bytes:
    """How far sequence numbers, and those of values, moved on from one step to the next."""
    size = min(len(before.base), len(look.base))
    moved = look.base[:size] - before.base[:size]
    moved[(look.base[:size] == 0) | (before.base[:size] == 0)] = 0
    text = repr([(p, look.items[p] - n) for p, n in sorted(before.items.items()) if p in look.items]) if items else ""
    return hashlib.blake2b(moved.tobytes() + text.encode(), digest_size=16).digest()
