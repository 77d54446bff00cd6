"""A candidate's statistics as sums over the reference's tiles: a shard is shorter than the whole, so its own tiles may be finer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle.merging.decoding import View
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.numbers.tiles import EXACT, QUANTUM, coarser, sketch
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import RankRecord, Recording
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Tile = tuple[int, ...]
_Place = tuple[str, str, str]  # kind, name, slot


class Tiled(View):
    """A rank's record of which some tensors are sums over larger tiles than were recorded; they are made when they are asked for."""

    def __init__(self, record: RankRecord) -> None:
        super().__init__(record, [], record.info)
        self.dry = record.dry
        self.own: dict[str, Entry] = {}

    def array(self, entry: Entry) -> Array:
        """As of `RankRecord`."""
        own = self.own.get(entry.tensor)
        if own is None:
            return super().array(entry)
        values = np.asarray(as_float(self._record.array(own), own.dtype), dtype=np.float64)
        if not own.tile and own.kind in EXACT:
            values = np.round(values / QUANTUM) * QUANTUM
        return sketch(values, entry.tile, own.tile)


class Fitted(Recording):
    """A candidate's recording in the reference's tiles.

    Args:
        recording: of the candidate.
        wanted: tiles of the reference's tensors.

    Attributes:
        apart: tensors whose shards do not end where tiles do, so that they cannot be compared.
        plain: tensors that are there as a whole, and sums.
    """

    def __init__(self, recording: Recording, wanted: Mapping[_Place, Tile], plan: Plan | None) -> None:
        self.path, self.info = recording.path, recording.info
        self._recording, self._wanted, self._plan = recording, wanted, plan
        self._kinds: dict[tuple[str, int], set[Tile]] = {}
        for (kind, _, _), tile in wanted.items():
            self._kinds.setdefault((kind, len(tile)), set()).add(tile)
        self.apart: set[str] = set()

    def ranks(self, run: str = "clean") -> dict[int, RankRecord]:
        """As of `Recording`."""
        return {rank: self._tiled(record) for rank, record in self._recording.ranks(run).items()}

    def _tiled(self, record: RankRecord) -> RankRecord:
        made = Tiled(record)
        name = self._names(record)
        made.entries = [e for one in record.entries for e in self._fit(made, one, name)]
        made.evaluations = [e for one in record.evaluations for e in self._fit(made, one, name)]
        return made

    def _names(self, record: RankRecord) -> Callable[[str], str]:
        coords, plan = record.info.coords, self._plan
        return (lambda name: plan.canonical(name, coords)) if plan is not None else (lambda name: name)

    def _fit(self, made: Tiled, entry: Entry, name: Callable[[str], str]) -> Iterator[Entry]:
        own = entry.tile or (1,) * len(entry.shape)
        shape = tuple(n * t for n, t in zip(entry.shape, own, strict=True))
        tile = self._tile(entry, name(entry.name), own, shape)
        if tile == own:
            yield self._placed(entry, tile) or entry
            return
        fits = coarser(own, tile, shape) and entry.span is None
        found = self._placed(entry, tile) if fits else None
        if found is None:
            self.apart.add(f"{entry.kind} {entry.name}")
            return
        made.own[entry.tensor] = entry
        yield msgspec.structs.replace(found, shape=tuple(n // t for n, t in zip(shape, tile, strict=True)), tile=tile, dtype="float64", of=entry.precision)

    def _tile(self, entry: Entry, name: str, own: Tile, shape: tuple[int, ...]) -> Tile:
        """The reference's tile for a tensor; of one that goes by another name there, what all that it may be have."""
        known = self._wanted.get((entry.kind, name, entry.slot))
        if known is not None and len(known) == len(own):
            return known
        like = [t for t in self._kinds.get((entry.kind, len(own)), ()) if coarser(own, t, shape)]
        return like[0] if len(like) == 1 else own

    @staticmethod
    def _placed(entry: Entry, tile: Tile) -> Entry | None:
        """With the shape of the whole DTensor in tiles; `None` where it does not end with one."""
        whole = entry.placement
        if whole is None or math.prod(tile) == 1:
            return entry
        if len(whole.shape) != len(tile) or any(n % t for n, t in zip(whole.shape, tile, strict=True)):
            return None
        return msgspec.structs.replace(entry, placement=msgspec.structs.replace(whole, shape=tuple(n // t for n, t in zip(whole.shape, tile, strict=True))))

    def said(self) -> list[str]:
        """What was not compared."""
        if not self.apart:
            return []
        names = sorted(self.apart)
        return [f"{len(names):,} tensors whose shards do not end where tiles of statistics do ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}): record them whole"]


def fitted(reference: Recording, candidate: Recording, plan: Plan | None) -> Recording:
    """The candidate in the reference's tiles, where statistics were recorded; as it is where whole tensors were.

    Raises:
        OracleError: only one of them holds statistics, or the reference has several ranks.
    """
    if reference.info.statistics != candidate.info.statistics:
        which = "reference" if reference.info.statistics else "candidate"
        raise OracleError(f"only the {which} was recorded with --statistics", hint="record both alike")
    if not reference.info.statistics or isinstance(candidate, Fitted):
        return candidate
    ranks = reference.ranks(reference.trusted)
    if len(ranks) > 1:
        raise OracleError("a reference with --statistics must have one rank", hint="record whole tensors of it, or one device")
    wanted: dict[_Place, Tile] = {}
    for e in itertools.chain.from_iterable((*r.entries, *r.evaluations) for r in ranks.values()):
        wanted.setdefault((e.kind, e.name, e.slot), e.tile or (1,) * len(e.shape))
    return Fitted(candidate, wanted, plan)
