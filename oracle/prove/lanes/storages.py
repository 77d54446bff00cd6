"""Storages of families of ranks: what a window shows on all lanes, and what is written to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from proctor.oracle.prove.lanes.domain import (
    Laned,
    Lanes,
    Wide,
    common,
    lanes_of,
    of_lanes,
    packed,
    values,
    widened,
)
from proctor.oracle.prove.lanes.family import Shifted, World
from proctor.oracle.prove.machine import Machine, Seen, _Rank, _view
from proctor.oracle.prove.tape import Array, Node, Window


class Storages(Machine):
    """See the module."""

    def __init__(self, world: World, domain: Wide, leaves: Mapping[tuple[int, int], Array], seen: Seen | None = None) -> None:
        self.world = world
        self._axes, self._one = len(world.lanes), (1,) * len(world.lanes)
        self._laned = Laned(domain, self._axes)
        super().__init__([family.tape for family in world.families], self._laned, leaves, seen)

    def _lanes_at(self, rank: _Rank, w: Window) -> Lanes:
        """Of what `read` gives."""
        lanes = lanes_of(self._storage(rank, w), self._axes)
        return common([lanes, tuple(n if s else 1 for n, s in zip(self.world.sizes, w.steps))], self._axes) if isinstance(w, Shifted) else lanes

    def read(self, r: int, w: Window) -> Array:
        """What a window shows on all lanes: a view, but for windows that lie elsewhere on each."""
        storage = self._storage(self._ranks[r], w)
        if not isinstance(w, Shifted):
            return _view(storage, w)
        grid = np.zeros(w.size, np.int64) + w.offset
        for dim, (n, s) in enumerate(zip(w.size, w.stride)):
            grid = grid + (np.arange(n) * s).reshape((-1,) + (1,) * (len(w.size) - dim - 1))
        lanes = common([lanes_of(storage, self._axes), tuple(n if s else 1 for n, s in zip(self.world.sizes, w.steps))], self._axes)
        spots = np.indices(lanes)
        moved = sum((s * spots[k] for k, s in enumerate(w.steps)), np.zeros(lanes, np.int64))
        held = values(storage, self._axes)
        at = grid.reshape(grid.shape + (1,) * self._axes) + moved
        lane = tuple(np.broadcast_to(spots[k] if held.shape[1 + k] > 1 else 0, at.shape) for k in range(self._axes))
        return packed(held[(at, *lane)], self._axes)

    def _write(self, rank: _Rank, w: Window, value: Array) -> None:
        storage = self._storage(rank, w)
        value = np.asarray(value)
        have, given = lanes_of(storage, self._axes), lanes_of(value, self._axes)
        if isinstance(w, Shifted):
            self._write_shifted(rank, w, value)
            return
        lanes = given if w.numel == len(storage) and value.size == w.numel else common([have, given], self._axes)
        if lanes != have:
            dtype = storage.dtype[0] if storage.dtype.names else storage.dtype
            storage = np.zeros(len(storage), of_lanes(dtype.base, lanes)) if w.numel == len(storage) else widened(storage, lanes).copy()
            rank.storages[w.storage] = storage
        value = widened(value, lanes)
        _view(storage, w)[...] = value.reshape(w.size) if value.size == w.numel else value

    def _keep(self, rank: _Rank, node: Node, w: Window, value: Array) -> None:
        """What an operation gives: where that is a whole storage, the array itself, unless something else lies in it."""
        whole = w.kind == "f" and len(node.outs) == 1 and value.size == w.numel > 1 and w.offset == 0 and w.numel == rank.extents[w.storage] and not isinstance(w, Shifted)
        own = whole and _in_order(w.size, w.stride) and value.flags.c_contiguous and value.flags.writeable and (value.dtype.names or value.dtype == self.d.dtype)
        if own and not any(np.may_share_memory(value, rank.storages[v.storage]) for v in node.ins if v.storage in rank.storages):
            rank.storages[w.storage] = value.reshape(-1)
        else:
            self._write(rank, w, value)

    def _write_shifted(self, rank: _Rank, w: Shifted, value: Array) -> None:
        steps = tuple(n if s else 1 for n, s in zip(self.world.sizes, w.steps))
        lanes = common([lanes_of(rank.storages[w.storage], self._axes), lanes_of(value, self._axes), steps], self._axes)
        storage = rank.storages[w.storage] = widened(rank.storages[w.storage], lanes).copy()
        held, given = values(storage, self._axes), values(widened(value, lanes), self._axes)
        for at in np.ndindex(*lanes):
            lane = np.ascontiguousarray(held[(slice(None), *at)])
            moved = Window(w.storage, w.offset + sum(s * x for s, x in zip(w.steps, at)), w.size, w.stride, w.kind)
            _view(lane, moved)[...] = given[(..., *at)].reshape(w.size)
            held[(slice(None), *at)] = lane

    def _storage(self, rank: _Rank, w: Window) -> Array:
        found = rank.storages.get(w.storage)
        if found is None:  # as long as any of its windows needs
            found = rank.storages[w.storage] = self._born(rank, w)
        return found

    def _born(self, rank: _Rank, w: Window) -> Array:
        given = self._leaves.get((rank.tape.rank, w.storage))
        if given is None or not given.dtype.names:
            return super()._born(rank, w)
        made = np.zeros(max(rank.extents[w.storage], w.end), given.dtype)
        made[: len(given)] = given[: len(made)]
        return made


@functools.lru_cache(1 << 14)
def _in_order(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a window's elements lie one after the other."""
    step = 1
    for n, s in zip(reversed(size), reversed(stride)):
        if n != 1 and s != step:
            return False
        step *= n
    return True


__all__ = ["Storages"]
