"""A trainer scores a sequence in one forward; an engine reads a prompt and then one token at a time. Both compute the same positions.

The engine's forwards that together read what one forward of the trainer reads, token for token, are taken as that one: their tensors
are joined along the positions, and the trainer's are cut to the positions that the engine computed (of logits often the last ones of the
prompt only, and never those of a token that was generated last and not read).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.store import ProcessInfo, RankRecord
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Place = tuple[str, str, str]  # kind, name, slot

CROSSING: Final = ("input", "output", "logprob")
POSITIONS: Final = 1  # the dimension along which they lie, behind the rows of the batch


class View(RankRecord):
    """A rank's record with other entries, of which some may be made here.

    Args:
        record: of the rank.
        entries: that are seen.
        info: of the process.

    Attributes:
        made: values by the name of their tensor.
    """

    def __init__(self, record: RankRecord, entries: list[Entry], info: ProcessInfo) -> None:
        self.__dict__.update(vars(record))
        self.entries, self.info, self.dry = entries, info, {}
        self.made: dict[str, Array] = {}
        self._record = record  # may itself be one that is made

    def array(self, entry: Entry) -> Array:
        """As of `RankRecord`."""
        return self.made[entry.tensor] if entry.tensor in self.made else self._record.array(entry)


class Group(NamedTuple):
    """Forwards that read one sequence together.

    Args:
        call: the forward of the trainer that reads it in one.
        spans: by forward of the engine, from which position to which it reads.
        rows: of the batch.
        length: of the trainer's sequence.
    """

    call: int
    spans: dict[int, tuple[int, int]]
    rows: int
    length: int


def groups(trainer: RankRecord, engine: RankRecord) -> list[Group]:
    """Which forwards of an engine are one of the trainer's; none where each is one by itself, or nothing tells."""
    theirs, mine = _tokens(trainer), _tokens(engine)
    out: list[Group] = []
    left = sorted(mine)
    for call in sorted(theirs):
        whole, spans, at = theirs[call], dict[int, tuple[int, int]](), 0
        while left and at < whole.shape[1]:
            part = mine[left[0]]
            end = at + part.shape[1]
            if part.shape[0] != whole.shape[0] or end > whole.shape[1] or not np.array_equal(part, whole[:, at:end]):
                break
            spans[left.pop(0)] = at, end
            at = end
        if spans:
            out.append(Group(call, spans, whole.shape[0], whole.shape[1]))
    return out if any(len(g.spans) > 1 for g in out) else []


def joined(record: RankRecord, found: list[Group]) -> tuple[View, dict[tuple[int, Place], Array]]:
    """An engine's record as if each group were one forward, and by forward and tensor the positions that it has."""
    kept = [e for e in record.entries if e.kind == "param"]
    view = View(record, kept, msgspec.structs.replace(record.info, evaluated={}))
    positions: dict[tuple[int, Place], Array] = {}
    for group in found:
        held: dict[Place, dict[int, Entry]] = {}
        for e in record.entries:
            if e.call in group.spans and e.kind in CROSSING:
                held.setdefault((e.kind, e.name, e.slot), {})[e.call] = e
        for place, by_call in held.items():
            made = _join(record, group, by_call)
            if made is None:
                continue
            values, where = made
            first = by_call[min(by_call)]
            name = f"joined-{first.tensor}"
            view.made[name], positions[group.call, place] = values, where
            kept.append(msgspec.structs.replace(first, call=group.call, shape=tuple(values.shape), tensor=name, stats=()))
    return view, positions


def cut(record: RankRecord, found: list[Group], positions: Mapping[tuple[int, Place], Array]) -> View:
    """A trainer's record with the positions that the engine computed."""
    by_call = {g.call: g for g in found}
    kept: list[Entry] = []
    view = View(record, kept, msgspec.structs.replace(record.info, evaluated={}))
    for e in record.entries:
        group = by_call.get(e.call)
        if e.kind == "param":
            kept.append(e)
        elif group is not None and e.kind in CROSSING and e.shape[:2] == (group.rows, group.length):
            end = max(b for _, b in group.spans.values())
            where = positions.get((e.call, (e.kind, e.name, e.slot)), np.arange(end))
            values = record.array(e)[:, where]
            name = f"cut-{e.tensor}"
            view.made[name] = np.ascontiguousarray(values)
            kept.append(msgspec.structs.replace(e, shape=tuple(values.shape), tensor=name, stats=()))
    return view


def _join(record: RankRecord, group: Group, by_call: Mapping[int, Entry]) -> tuple[Array, Array] | None:
    """A tensor of all forwards of a group, and the positions that it has; `None` where it has none that can be told."""
    if by_call.keys() != group.spans.keys() or len({(e.dtype, e.shape[:1], e.shape[2:]) for e in by_call.values()}) > 1:
        return None
    parts, where = [], []
    for call in sorted(by_call):
        entry, (begin, end) = by_call[call], group.spans[call]
        if len(entry.shape) < 2 or entry.shape[0] != group.rows or entry.shape[POSITIONS] not in (end - begin, 1):
            return None
        parts.append(record.array(entry))
        where.append(np.arange(end - entry.shape[POSITIONS], end))
    return np.concatenate(parts, axis=POSITIONS), np.concatenate(where)


def _tokens(record: RankRecord) -> dict[int, Array]:
    """By forward the numbers that the model reads, rows × positions."""
    inputs = [e for e in record.entries if e.kind == "input" and len(e.shape) == 2 and e.dtype in ("int64", "int32") and e.shape[0] and e.shape[1]]
    first = min(inputs, key=lambda e: e.order, default=None)
    if first is None:
        return {}
    return {e.call: record.array(e) for e in inputs if (e.name, e.slot) == (first.name, first.slot)}
