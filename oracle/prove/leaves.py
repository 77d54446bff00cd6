"""Which element of the reference an element of a rank's parameter is: so that both get the same symbol, and outputs can be compared.

Nobody has to annotate: a rank's part is found by what DTensor says of it, by the plan, or by its values, which random initialisation
makes different; each is checked against the values. Parameters that are constant (biases of zeros, norms of ones) and cut go by
their module's weight. What stays ambiguous shares one symbol for equal values, and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.oracle.plans.placements import from_dtensor
from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.machine import literal
from proctor.oracle.prove.tape import ROOT, Array, Held, Tape, Window

PADDING = -1
UNCLEAR = "?"


class Alignment(msgspec.Struct):
    """Where a rank's parameters lie.

    Attributes:
        index: (rank, name) → for each element of its part the position in the reference's parameter, PADDING for none.
        of: (rank, name) → the reference's name of it.
        merged: reference parameters whose elements of equal value share a symbol.
        strange: parts whose values are not the reference's.
        unplaced: parts whose values are those of several parameters, and whose names are none of the reference's.
    """

    index: dict[tuple[int, str], Array] = {}
    of: dict[tuple[int, str], str] = {}
    merged: set[str] = set()
    strange: list[str] = []
    unplaced: list[str] = []


def content(tape: Tape, w: Window) -> Array | None:
    """What a window of a leaf held when the step began, in its own order; None where it was made within the step."""
    leaf = next((leaf for leaf in tape.leaves if leaf.storage == w.storage), None)
    if leaf is None or tape.blocks[leaf.block].size < w.end:
        return None
    block = tape.blocks[leaf.block]
    item = block.itemsize
    shown = np.ndarray(w.size, block.dtype, np.ascontiguousarray(block), w.offset * item, tuple(s * item for s in w.stride))
    return np.asarray(shown, np.float64).reshape(-1)


def align(reference: Tape, candidate: Sequence[Tape], plan: Plan | None = None) -> Alignment:
    """Place every rank's parameters."""
    whole = {held.name: (held, values) for held in reference.held if (values := content(reference, held.window)) is not None}
    found = Alignment()
    everything = _Values(whole)
    for tape in candidate:
        renamed = _Roots(tape, whole).names()
        for held in tape.held:
            values = content(tape, held.window)
            if values is None:
                continue
            name = plan.canonical(held.name, _coords(plan, tape.rank), "param") if plan is not None else held.name
            name = renamed.get(held.name, name)
            if name == UNCLEAR:
                found.unplaced.append(f"{held.name} on rank {tape.rank}")
                continue
            if name not in whole:
                name, index, unclear = everything.locate(values)
                if unclear:
                    found.unplaced.append(f"{held.name} on rank {tape.rank}")
                    continue
            else:
                index = _place(held, values, whole[name], name, tape.rank, plan, found)
                if index is None:  # such as experts that each rank numbers from 0
                    elsewhere, other, unclear = everything.locate(values)
                    if other is not None and not unclear and (other >= 0).all():
                        name, index = elsewhere, other
            if index is None:
                found.strange.append(f"{held.name} on rank {tape.rank}")
                continue
            found.of[tape.rank, held.name], found.index[tape.rank, held.name] = name, index
    return found


def _coords(plan: Plan, rank: int) -> dict[str, int]:
    return dict(plan.mesh.coords(rank)) if plan.mesh.axes and rank < plan.mesh.world else {}


class _Values:
    """All values of the reference, for parts that have no name in it."""

    def __init__(self, whole: dict[str, tuple[Held, Array]]) -> None:
        self._whole = whole

    def locate(self, values: Array) -> tuple[str, Array | None, bool]:
        """Name, positions, and whether there are several of them."""
        places = []
        for name, (_, there) in self._whole.items():
            if there.size and np.isin(values[:8], there).all():
                index, twice = _by_value(values, there)
                if index is not None:
                    if not twice and len(np.unique(values)) > 1:
                        return name, index, False
                    places.append((name, index, twice))
        if len(places) == 1 and (not places[0][2] or values.size == self._whole[places[0][0]][1].size):
            return places[0][0], np.arange(values.size) if places[0][2] else places[0][1], False
        return "", None, bool(places)


class _Roots:
    """Modules that a program calls beside others: which of the reference's they are, by their names and values together."""

    def __init__(self, tape: Tape, whole: dict[str, tuple[Held, Array]]) -> None:
        self._tape, self._whole = tape, whole

    def names(self) -> dict[str, str]:
        """The reference's names of parameters whose own are none of its, UNCLEAR where they may be several's."""
        groups: dict[str, list[tuple[str, Held]]] = {}
        for held in self._tape.held:
            buffer = "buffer " if held.name.startswith("buffer ") else ""
            name = held.name.removeprefix("buffer ")
            root = name.split(".")[0] if name.startswith(ROOT) else ""
            groups.setdefault(root, []).append((buffer + name[len(root) + 1 if root else 0 :], held))
        found: dict[str, str] = {}
        used: set[str] = set()
        waiting = {root: members for root, members in groups.items() if any(held.name not in self._whole for _, held in members)}
        used = {name for root, members in groups.items() if root not in waiting for name, _ in members}
        while waiting:
            fitting = {root: [b for b in self._beginnings(members) if not used & {_within(b, n) for n, _ in members}] for root, members in waiting.items()}
            root = min(fitting, key=lambda r: (len(fitting[r]) != 1, r))
            members, fits = waiting.pop(root), fitting[root]
            if len(fits) == 1:
                found.update({held.name: _within(fits[0], name) for name, held in members})
                used |= {_within(fits[0], name) for name, _ in members}
            elif fits:
                found.update({held.name: UNCLEAR for _, held in members})
        return found

    def _beginnings(self, members: list[tuple[str, Held]]) -> list[str]:
        """What names of the reference begin with that end as these do and hold their values."""
        name = members[0][0].removeprefix("buffer ")
        ends = [n.removeprefix("buffer ") for n in self._whole]
        beginnings = dict.fromkeys(n[: len(n) - len(name)] for n in ends if n.endswith("." + name) or n == name)
        return [b for b in beginnings if all((n := _within(b, own)) in self._whole and self._holds(held, *self._whole[n], n) for own, held in members)]

    def _holds(self, held: Held, there: Held, values: Array, name: str) -> bool:
        own = content(self._tape, held.window)
        return own is None or _place(held, own, (there, values), name, self._tape.rank, None, Alignment()) is not None


def _within(beginning: str, name: str) -> str:
    buffer = "buffer " if name.startswith("buffer ") else ""
    return buffer + beginning + name.removeprefix("buffer ")


def _place(held: Held, values: Array, whole: tuple[Held, Array], name: str, rank: int, plan: Plan | None, found: Alignment) -> Array | None:
    there = whole[1]
    shape = whole[0].window.size
    for index in (_declared(held, shape), _planned(plan, name, shape, rank), _identity(values, there)):
        if index is not None and index.size == values.size and np.array_equal(there[index], values):
            return index
    index = _sliced(values, held.window.size, there, shape)
    if index is not None:
        return index
    index, ambiguous = _by_value(values, there)
    if index is None:
        return None
    if ambiguous:
        sibling = _sibling(name, rank, shape, values.size, found)
        if sibling is not None and np.array_equal(there[sibling], values):
            return sibling
        found.merged.add(name)
    return index


def _identity(values: Array, there: Array) -> Array | None:
    return np.arange(there.size) if values.size == there.size else None


def _sliced(values: Array, part: tuple[int, ...], there: Array, shape: tuple[int, ...]) -> Array | None:
    """As the only one of equal slices along one dimension that has the values."""
    cut = [k for k, (n, m) in enumerate(zip(part, shape)) if n != m]
    if len(part) != len(shape) or len(cut) != 1 or not part[cut[0]] or shape[cut[0]] % part[cut[0]]:
        return None
    slices = np.split(np.arange(there.size).reshape(shape), shape[cut[0]] // part[cut[0]], cut[0])
    found = [index.reshape(-1) for index in slices if np.array_equal(there[index.reshape(-1)], values)]
    return found[0] if len(found) == 1 else None


def _declared(held: Held, shape: tuple[int, ...]) -> Array | None:
    """By DTensor's placements."""
    if not held.placements or held.shape != shape:
        return None
    try:
        mesh, layout, _ = from_dtensor({"axes": [""] * len(held.mesh), "sizes": held.mesh, "placements": held.placements, "shape": shape})
    except OracleError:
        return None
    return _cut(layout.indices(shape, mesh, dict(zip(mesh.axes, held.coordinate))), shape)


def _cut(parts: Sequence[Any], shape: tuple[int, ...]) -> Array:
    index: Array = np.arange(int(np.prod(shape))).reshape(shape)
    for dim, part in enumerate(parts):
        index = index[(slice(None),) * dim + (part,)]
    return index.reshape(-1)


def _planned(plan: Plan | None, name: str, shape: tuple[int, ...], rank: int) -> Array | None:
    if plan is None or rank >= plan.mesh.world:
        return None
    layout = plan.param_layout(name)
    if layout is None:
        return None
    return _cut(layout.indices(shape, plan.mesh, plan.mesh.coords(rank)), shape)


def _by_value(values: Array, there: Array) -> tuple[Array | None, bool]:
    """Positions of values, and whether they are one of several; zeros that are nowhere are padding."""
    if not there.size:
        return None, False
    order = np.argsort(there, kind="stable")
    ordered = there[order]
    at = np.searchsorted(ordered, values)
    at = np.minimum(at, ordered.size - 1)
    hit = ordered[at] == values
    index = np.where(hit, order[at], PADDING)
    if not hit.all() and (values[~hit] != 0).any():
        return None, False
    again = np.minimum(at + 1, ordered.size - 1)
    twice = hit & (again != at) & (ordered[again] == values)
    return index, bool(twice.any())


def _sibling(name: str, rank: int, shape: tuple[int, ...], size: int, found: Alignment) -> Array | None:
    """The rows that the rank has of the weight beside a bias."""
    weight = found.index.get((rank, name.rsplit(".", 1)[0] + ".weight"))
    if weight is None or len(shape) != 1 or weight.size % size:
        return None
    rows = weight.reshape(size, -1)
    return rows[:, 0] // rows.shape[1] if (rows // rows.shape[1] == rows[:, :1] // rows.shape[1]).all() else None


def elements(domain: Domain, tape: Tape, reference: Tape, alignment: Alignment | None) -> dict[tuple[int, int], Array]:
    """The elements of the storages that hold a rank's parameters; others are literals (`Machine.literal`).

    Args:
        alignment: None for the reference itself.
    """
    if domain.name == "f64":
        return {}
    found: dict[tuple[int, int], Array] = {}
    blocks = {leaf.storage: tape.blocks[leaf.block] for leaf in tape.leaves if leaf.kind == "f"}
    keys_of = {held.name: keys(reference, held, alignment is not None and held.name in alignment.merged) for held in reference.held}
    for held in tape.held:
        w = held.window
        if w.storage not in blocks or blocks[w.storage].size < w.end:
            continue
        if alignment is None:
            symbols = keys_of[held.name]
        else:
            index = alignment.index.get((tape.rank, held.name))
            if index is None:
                continue
            there = keys_of[alignment.of[tape.rank, held.name]]
            symbols = np.where(index >= 0, there[index], 0)
        elements_ = domain.symbol(symbols)
        if alignment is not None:
            elements_ = np.where(symbols == 0, domain.const(0.0), elements_)
        if (tape.rank, w.storage) not in found:
            whole = w.numel == blocks[w.storage].size
            found[tape.rank, w.storage] = np.zeros(w.numel, domain.dtype) if whole else literal(domain, blocks[w.storage]).copy()
        storage = found[tape.rank, w.storage]
        item = storage.itemsize
        np.ndarray(w.size, storage.dtype, storage, w.offset * item, tuple(s * item for s in w.stride))[...] = elements_.reshape(w.size)
    return found


def keys(reference: Tape, held: Held, merged: bool) -> Array:
    """A key for each element of a reference parameter: its place in its storage, so that tied names share it; of merged ones its value."""
    w = held.window
    grid = np.zeros(w.size, np.int64) + w.offset
    for dim, (n, s) in enumerate(zip(w.size, w.stride)):
        grid = grid + (np.arange(n) * s).reshape((-1,) + (1,) * (len(w.size) - dim - 1))
    flat = grid.reshape(-1) + 1
    if merged:
        values = content(reference, w)
        if values is not None:
            _, first = np.unique(values, return_index=True)
            _, back = np.unique(values, return_inverse=True)
            flat = flat[first][back.reshape(-1)]
    return flat + (np.int64(w.storage + 1) << 36)
