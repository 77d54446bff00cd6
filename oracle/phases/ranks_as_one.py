"""A reference of several ranks (FSDP2, or tensor parallelism with DTensors) as if one process had recorded it.

Tensors that are DTensors are put together to the whole, as a candidate's are. What else ranks hold is one tensor where they read the same
data, and it is the same bits; where they read other data, the forwards of each rank are forwards of the one process, one rank behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle.merging.decoding import View
from proctor.oracle.merging.locate import Index
from proctor.oracle.merging.merge import Held, join, where
from proctor.oracle.merging.replicas import Shard
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tiles import EXACT, QUANTUM, coarser, sketch, summed, tiles_of
from proctor.oracle.plans.mesh import Layout, Mesh
from proctor.oracle.plans.placements import from_dtensor
from proctor.oracle.store import RankRecord, Recording
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]

_CROSSING = frozenset({"input", "output", "grad_input", "grad_output", "score", "choice", "dropped", "mask"})


class OneRank(View):
    """All ranks' records as that of one; tensors of other ranks are read where they are."""

    def __init__(self, records: Mapping[int, RankRecord]) -> None:
        first = records[min(records)]
        super().__init__(first, [], first.info)
        self.sources: dict[str, tuple[RankRecord, Entry]] = {}
        self.apart: list[str] = []  # what ranks hold otherwise though they read the same data
        self._records = records

    def array(self, entry: Entry) -> Array:
        """As of `RankRecord`."""
        if entry.tensor in self.sources:
            record, own = self.sources[entry.tensor]
            return record.array(own)
        return super().array(entry)


class AsOne(Recording):
    """A recording of several ranks as one of one rank."""

    def __init__(self, recording: Recording) -> None:
        self.path, self.info = recording.path, recording.info
        self.apart: list[str] = []

    def ranks(self, run: str = "clean") -> dict[int, RankRecord]:
        """As of `Recording`."""
        made = _merged(super().ranks(run))
        self.apart = self.apart or made.apart
        return {0: made}


def as_one(reference: Recording) -> Recording:
    """A reference whose ranks are parts of one process; any other as it is, such as a pipeline, whose ranks have parameters of their own."""
    try:
        records = reference.ranks(reference.trusted)
    except OracleError:
        return reference  # whoever compares it says why
    held = [{e.name for e in record.entries if e.kind == "param" and e.step == 0} for record in records.values()]
    if len(records) < 2 or any(names != held[0] for names in held) or not any(e.placement for e in records[min(records)].entries if e.kind == "param"):
        return reference
    return AsOne(reference)


def _merged(records: Mapping[int, RankRecord]) -> OneRank:
    out = OneRank(records)
    turns = _own_data(records)
    by_key: dict[tuple[Any, ...], dict[int, Entry]] = {}
    for rank, record in records.items():
        for e in (*record.entries, *record.evaluations):
            by_key.setdefault((e.phase, e.step, e.call, e.kind, e.name, e.slot, e.recompute), {})[rank] = e
    calls: dict[tuple[str, int, str], int] = {}
    for phase, step, call, kind, name, _, _ in by_key:
        if kind in _CROSSING or name == "loss":
            calls[phase, step, name] = max(calls.get((phase, step, name), 0), call + 1)
    entries: list[Entry] = []
    for (phase, step, call, kind, name, *_), held in by_key.items():
        one = held[min(held)]
        if any(e.placement for e in held.values()) and (kind not in _CROSSING or not turns):
            parts = tiled(records, held)
            whole = _whole(parts) if parts is not None else None
            if whole is not None:
                tensor = f"whole-{one.tensor}"
                out.made[tensor] = whole
                some = parts[0].entry if parts else one
                entries.append(msgspec.structs.replace(some, tensor=tensor, shape=tuple(whole.shape), placement=None, stats=together(parts or ())))
            elif parts is None:
                out.apart.append(name)  # shards do not end where tiles of the whole do
        elif turns and (kind in _CROSSING or name == "loss"):
            for rank, e in held.items():
                tensor = f"{rank}-{e.tensor}"
                out.sources[tensor] = records[rank], e
                entries.append(msgspec.structs.replace(e, tensor=tensor, call=rank * calls[phase, step, name] + call))
        else:
            if kind in _CROSSING and len({records[r].array(e).tobytes() for r, e in held.items()}) > 1:
                if name not in out.apart:
                    out.apart.append(name)
                continue  # parts that are no DTensors: where they lie nobody says
            entries.append(one)
    out.entries = [e for e in entries if not e.phase]
    out.evaluations = [e for e in entries if e.phase]
    evaluated = {step: {n: c * (len(records) if turns else 1) for n, c in counts.items()} for step, counts in out.info.evaluated.items()}
    out.info = msgspec.structs.replace(out.info, rank=0, world=1, coords={}, evaluated=evaluated)
    return out


def _own_data(records: Mapping[int, RankRecord]) -> bool:
    """Whether ranks read other data: what goes into the first module is not the same."""
    seen = set()
    for record in records.values():
        first = min((e for e in record.entries if e.kind == "input" and not e.recompute), key=lambda e: e.order, default=None)
        seen.add(record.array(first).tobytes() if first is not None else b"")
    return len(seen) > 1


class Part(NamedTuple):
    """What a rank holds of a DTensor, in tiles of the whole where statistics were recorded."""

    rank: int
    record: RankRecord
    entry: Entry
    values: Array


def tiled(records: Mapping[int, RankRecord], held: Mapping[int, Entry]) -> list[Part] | None:
    """The shards of a DTensor as sums over the tiles that the whole of it has by itself; as they are where whole tensors were recorded.

    Returns:
        `None` where a shard does not end with a tile; [] where one is no DTensor.
    """
    found = [(rank, e, records[rank].array(e)) for rank, e in held.items()]
    if any(e.placement is None for _, e, _ in found):
        return []
    if not any(e.tile for _, e, _ in found):
        return [Part(rank, records[rank], e, values) for rank, e, values in found]
    out: list[Part] = []
    for rank, e, values in found:
        placement = e.placement
        assert placement is not None
        tile, own = tiles_of(tuple(placement.shape), e.kind), e.tile or (1,) * len(e.shape)
        shape = tuple(n * t for n, t in zip(e.shape, own, strict=True))
        if len(tile) != len(own) or not coarser(own, tile, shape):
            return None
        stats, of = e.stats, e.precision
        if not e.tile:
            values = np.asarray(as_float(values, e.dtype), dtype=np.float64)
            stats = _numbers(values)
            values = np.round(values / QUANTUM) * QUANTUM if e.kind in EXACT else values
        cut = msgspec.structs.replace(placement, shape=tuple(n // t for n, t in zip(placement.shape, tile, strict=True)))
        entry = msgspec.structs.replace(e, tile=tile, placement=cut, dtype="float64", of=of, stats=stats)
        out.append(Part(rank, records[rank], entry, sketch(values, tile, own)))
    return out


def _numbers(values: Array) -> tuple[float, ...]:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return float(values.size), float(finite.sum()), float((finite * finite).sum()), low, high, float(values.size - finite.size)


def together(parts: Sequence[Part]) -> tuple[float, ...]:
    """Numbers of all elements from those of shards; () where there are none, or ranks hold addends."""
    seen: dict[tuple[bytes, ...], tuple[float, ...]] = {}
    for part in parts:
        places, addend, _, _ = _place(part)
        if addend or not part.entry.stats:
            return ()
        seen[tuple(i.tobytes() for i in places)] = part.entry.stats
    return summed(seen.values()) if seen else ()


def _place(part: Part) -> tuple[Index, tuple[int, ...], Layout, tuple[int, ...]]:
    mesh, layout, whole = from_dtensor(msgspec.to_builtins(part.entry.placement))
    coords = _coords(part.rank, mesh, part.record)
    places, addend = where(layout, mesh, coords, whole)
    return places, addend, layout if layout is not None else Layout(), tuple(whole)


def _whole(parts: Sequence[Part]) -> Array | None:
    """A DTensor put together; `None` where the ranks do not have all of it."""
    held: list[Held] = []
    shape: tuple[int, ...] = ()
    for part in parts:
        places, addend, layout, shape = _place(part)
        coords = _coords(part.rank, from_dtensor(msgspec.to_builtins(part.entry.placement))[0], part.record)
        held.append(Held(Shard(part.rank, coords, part.values, part.entry.dtype), places, addend, layout))
    full, _ = join(held, shape) if held else (None, [])
    return None if full is None else np.ascontiguousarray(full)


def _coords(rank: int, mesh: Mesh, record: RankRecord) -> dict[str, int]:
    known = record.info.coords
    return {a: known[a] for a in mesh.axes} if all(a in known for a in mesh.axes) else dict(mesh.coords(rank % mesh.world))
