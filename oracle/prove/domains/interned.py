"""An element that one operation makes of the same elements is the same element, in whatever array it was made: of a part of the rows, on another rank, by another microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.tape import Array

_LARGEST: Final = 1 << 31  # ids of which two are one number
_MOST: Final = 3_000_000  # elements that are kept; a few hundred bytes each
_WIDTH: Final = 256  # bytes of a row that cost as much as an element


class Interned:
    """Elements by what they are made of."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._count = 0
        self._known: dict[tuple[Any, ...], dict[int, int]] = {}
        self._left = _MOST

    def find(self, op: str, params: tuple[Any, ...], inputs: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, Array, dict[int, int]]:
        """(numbers of what each element is made of, elements that are known already or -1, where to keep the others)."""
        keys = self._keys(op, params, inputs, shape)
        known = self._known.setdefault((op, () if op in ("sum", "largest") else params, len(inputs)), {})
        return keys, np.array([known.get(k, -1) for k in keys.tolist()], np.int64), known

    def keep(self, known: dict[int, int], keys: Array, ids: Array) -> None:
        """From now on."""
        if self._left > 0:
            self._left -= len(keys)
            known.update(zip(keys.tolist(), ids.tolist()))

    def _keys(self, op: str, params: tuple[Any, ...], inputs: Sequence[Array], shape: tuple[int, ...]) -> Array:
        if op == "matmul":
            a, b = inputs
            lead = shape[:-2]
            rows = np.broadcast_to(self._numbered(a.reshape(-1, a.shape[-1])).reshape(*a.shape[:-1], 1), shape)
            b = b.swapaxes(-1, -2)
            columns = np.broadcast_to(self._numbered(b.reshape(-1, b.shape[-1])).reshape(*b.shape[:-2], 1, b.shape[-2]), (*lead, *shape[-2:]))
            return _paired(rows, columns).reshape(-1)
        if op in ("sum", "largest"):
            a, axes = inputs[0], params[0] if op == "sum" else params
            kept = [k for k in range(a.ndim) if k not in axes]
            return self._numbered(a.transpose(*kept, *axes).reshape(math.prod(shape), -1))
        parts = [a.reshape(-1) if a.size == math.prod(shape) else np.broadcast_to(a, shape).reshape(-1) for a in inputs]
        if len(parts) == 1:
            return parts[0]
        if len(parts) == 2 and max(part.max(initial=0) for part in parts) < _LARGEST:
            return _paired(*parts)
        return -1 - self._numbered(np.stack(parts, 1))  # no pair is less than 0

    def _numbered(self, rows: Array) -> Array:
        """One number for equal rows."""
        rows = np.ascontiguousarray(rows)
        data, width = rows.tobytes(), rows.itemsize * rows.shape[1]
        if not width:
            return np.zeros(len(rows), np.int64)
        keep, here, found = self._left > 0, dict[bytes, int](), []
        for k in range(0, len(data), width):
            row = data[k : k + width]
            number = self._rows.get(row)
            if number is None and (number := here.get(row)) is None:
                number = here[row] = self._count
                self._count += 1
            found.append(number)
        if keep:
            self._rows.update(here)
            self._left -= len(here) * (1 + width // _WIDTH)
        return np.array(found, np.int64)


def _paired(a: Array, b: Array) -> Array:
    return np.asarray((a << 32) | b)
