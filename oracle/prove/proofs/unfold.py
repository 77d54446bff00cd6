"""Pairs of elements that are made in the same way of other elements: it is shown for one of them that they are equal, and holds for all.

A pair is unfolded: both formulas are followed back to where they are cut. Which operations were met, and which of the elements at the ends
are one and the same, is its pattern. Of a product of matrices all elements have one pattern, however large it is.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import numpy as np

from proctor.oracle.prove.domains.applied import Application, Applied
from proctor.oracle.prove.tape import Array

_MOST_ENDS: Final = 8192  # of one pair
_MOST: Final = 24_000_000  # ends of all pairs
_AT_ONCE: Final = 2_000_000
_MOST_BATCHES: Final = 256


def picked(one: Application, offsets: Array) -> list[Array]:
    """What goes into some elements of a result: an array (elements, how many) for each input."""
    if one.op == "matmul":
        a, b = one.inputs
        *lead, row, column = np.unravel_index(offsets, one.shape)
        left, right = (np.broadcast_to(x, (*one.shape[:-2], *x.shape[-2:])) for x in (a, b))
        return [left[(*lead, row)], right.swapaxes(-1, -2)[(*lead, column)]]
    if one.op in ("sum", "largest"):
        a, axes = one.inputs[0], one.params[0] if one.op == "sum" else one.params
        kept = [k for k in range(a.ndim) if k not in axes]
        return [a.transpose(*kept, *axes).reshape(math.prod(one.shape), -1)[offsets]]
    full = math.prod(one.shape)
    return [(a.reshape(-1)[offsets] if a.size == full else np.broadcast_to(a, one.shape)[np.unravel_index(offsets, one.shape)]).reshape(-1, 1) for a in one.inputs]


def patterns(domain: Applied, here: Array, there: Array, cone: list[int]) -> dict[bytes, Array] | None:
    """Which pairs have a pattern, by its name; None where they unfold too far.

    Args:
        cone: groups that are written out.
    """
    inside = np.array(cone, np.int64)
    found: dict[bytes, list[Array]] = {}
    todo = [(np.arange(here.size), np.stack([here, there], 1), np.zeros((here.size, 0), np.int64), b"")]
    batches = most = 0
    while todo:
        spots, open_, ends, text = todo.pop()
        batches += 1
        most += open_.size + ends.size
        if batches > _MOST_BATCHES or most > _MOST or open_.shape[1] + ends.shape[1] > _MOST_ENDS:
            return None
        groups = domain.groups_of(open_)
        groups = np.where(np.isin(groups, inside), groups, -1)
        for row, members in _by_row(groups):
            new, ended, more = _step(domain, open_[members], groups[row])
            done = np.concatenate([ends[members], ended], 1)
            if new.shape[1]:
                if new.shape[1] > _MOST_ENDS:
                    return None
                todo.append((spots[members], new, done, text + more))
            else:
                for key, same in _named(domain, done, text + more):
                    found.setdefault(key, []).append(spots[members[same]])
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _step(domain: Applied, open_: Array, groups: Array) -> tuple[Array, Array, bytes]:
    """Elements that are in one group a column, one operation further: (what goes in, what has ended, which operations they were)."""
    order, first, local = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(first)] = np.arange(len(order))
    local, text, new = rank[local], [], []
    for group in order[np.argsort(first)].tolist():
        columns = np.flatnonzero(groups == group)
        if group < 0:
            text.append("end")
            continue
        one: Application = domain.groups[group]
        inputs = picked(one, (open_[:, columns] - domain.base(group)).reshape(-1))
        new += [a.reshape(len(open_), -1) for a in inputs]
        text.append(repr((one.op, () if one.op in ("sum", "largest", "matmul") else one.params, [a.shape[1] for a in inputs])))
    found = np.concatenate(new, 1) if new else open_[:, :0]
    return found, open_[:, groups < 0], local.tobytes() + "\n".join(text).encode() + b"\0"


def _named(domain: Applied, ends: Array, text: bytes) -> list[tuple[bytes, Array]]:
    """Names of patterns, and which pairs have them: an element is where it is first met, a constant is itself."""
    found, step = [], max(1, _AT_ONCE // max(1, ends.shape[1]))
    for start in range(0, len(ends), step):
        part = ends[start : start + step]
        order = np.argsort(part, 1, kind="stable")
        ordered = np.take_along_axis(part, order, 1)
        fresh = np.ones(part.shape, bool)
        fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        begins = np.maximum.accumulate(np.where(fresh, np.arange(part.shape[1]), 0), 1)
        codes = np.empty_like(part)
        np.put_along_axis(codes, order, np.take_along_axis(order, begins, 1), 1)
        groups, back = np.unique(domain.groups_of(part), return_inverse=True)
        const = np.array([domain.is_const(g) for g in groups.tolist()], bool)[back].reshape(part.shape)
        codes[const] = -1 - part[const]
        for row, members in _by_row(codes):
            found.append((hashlib.blake2b(text + codes[row].tobytes(), digest_size=20).digest(), members + start))
    return found


def _by_row(rows: Array) -> list[tuple[int, Array]]:
    """Rows that are the same: (one of them, all of them)."""
    flat = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
    _, first, back = np.unique(flat, return_index=True, return_inverse=True)
    order = np.argsort(back.reshape(-1), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(back.reshape(-1)))[:-1])
    return list(zip(first.tolist(), parts))
