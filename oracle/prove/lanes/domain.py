"""A domain whose element stands for the values on all ranks of a family at once: one for each *lane*, a place on the mesh.

An array of such elements is a structured array: what moves data (views, gathers, permutations, joins) moves all lanes' values
together and needs to know nothing of them. Arithmetic is the domain's own, with lanes as trailing dimensions. What is the same on all
lanes of an axis is kept once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Final, Protocol

import numpy as np

from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array

Lanes = tuple[int, ...]  # how many along each axis; 1 where all are the same
_FIELD: Final = "v"
_SHORT: Final = 3  # addends


@functools.lru_cache(1024)
def of_lanes(dtype: Any, lanes: Lanes) -> Any:
    """The type of an element; a plain one where there is one lane."""
    return np.dtype([(_FIELD, dtype, lanes)]) if math.prod(lanes) > 1 else np.dtype(dtype)


def lanes_of(a: Array, axes: int) -> Lanes:
    """Of an array."""
    return a.dtype[_FIELD].shape if a.dtype.names else (1,) * axes


def values(a: Array, axes: int) -> Array:
    """The values, lanes as trailing dimensions: a view."""
    found: Array = a[_FIELD] if a.dtype.names else a.reshape(a.shape + (1,) * axes)
    return found


def packed(found: Array, axes: int) -> Array:
    """The other way round."""
    cut = found.ndim - axes
    shape, lanes = found.shape[:cut], found.shape[cut:]
    if math.prod(lanes) == 1:
        return found.reshape(shape)
    dtype = of_lanes(found.dtype, lanes)
    if not found.size:
        return np.zeros(shape, dtype)
    made: Array = np.ascontiguousarray(found).reshape(*shape, -1).view(dtype).reshape(shape)
    return made


def common(shapes: Iterable[Lanes], axes: int) -> Lanes:
    """What several arrays are brought to."""
    different = set(shapes)
    return next(iter(different)) if len(different) == 1 else tuple(max(n) for n in zip((1,) * axes, *different))


def widened(a: Array, lanes: Lanes) -> Array:
    """An array with as many lanes; it may be a view."""
    axes = len(lanes)
    if lanes_of(a, axes) == lanes:
        return a
    found = values(a, axes)
    return packed(np.broadcast_to(found, (*found.shape[: found.ndim - axes], *lanes)), axes)


def at_lane(v: Array, at: Sequence[int | None]) -> Array:
    """Values of a lane, or of a slice of lanes; what is the same on all is taken as it is."""
    axes, lead = len(at), v.ndim - len(at)
    return v[(..., *(slice(None) if x is None or v.shape[lead + k] == 1 else slice(x, x + 1) for k, x in enumerate(at)))] if axes else v


def places(lanes: Lanes) -> Iterator[tuple[int | None, ...]]:
    """Of all lanes; None along an axis on which all are the same."""
    yield from itertools.product(*([None] if n == 1 else range(n) for n in lanes))


class Wide(Domain, Protocol):
    """A domain that can also add up products along an axis of larger arrays."""

    def dot(self, a: Array, b: Array, axis: int) -> Array:
        """Σ a · b along an axis; the others broadcast."""
        ...


class Laned:
    """See the module. `lanes`: of the arrays that the next operations are about; their constants get as many."""

    def __init__(self, domain: Wide, axes: int) -> None:
        self.of, self.axes = domain, axes
        self.name, self.dtype = domain.name, domain.dtype
        self.lanes: Lanes = (1,) * axes

    def _two(self, operation: Any, a: Array, b: Array) -> Array:
        if not a.dtype.names and not b.dtype.names:
            return np.asarray(operation(a, b))
        return packed(operation(values(a, self.axes), values(b, self.axes)), self.axes)

    def _wide(self, a: Any) -> Array:
        return widened(np.asarray(a), self.lanes)

    def const(self, value: Fraction | Root | float) -> Any:
        """The element of a number."""
        found = self.of.const(value)
        return found if math.prod(self.lanes) == 1 else self._wide(found)

    def symbol(self, keys: Array) -> Array:
        """The same on all lanes."""
        return self._wide(self.of.symbol(keys))

    def ints(self, values: Array) -> Array:
        """The same on all lanes."""
        return self._wide(self.of.ints(values))

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        return self._two(self.of.add, a, b)

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""
        return self._two(self.of.sub, a, b)

    def mul(self, a: Array, b: Array) -> Array:
        """a · b."""
        return self._two(self.of.mul, a, b)

    def _one(self, operation: Any, a: Array) -> Array:
        return packed(np.asarray(operation(values(a, self.axes))), self.axes) if a.dtype.names else np.asarray(operation(a))

    def square(self, a: Array) -> Array:
        """a²."""
        return self._one(self.of.square, a)

    def inv(self, a: Array) -> Array:
        """1 / a."""
        return self._one(self.of.inv, a)

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes, on each lane."""
        axes = tuple(k % a.ndim for k in axes) if a.ndim else axes
        return self._one(lambda x: self.of.sum(x, axes, keep), a)

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products, on each lane."""
        if 0 < a.shape[-1] <= _SHORT and min(a.ndim, b.ndim) > 1:
            return self._short(a, b)
        if not a.dtype.names and not b.dtype.names:
            return self.of.matmul(a, b)
        most, n = max(a.ndim, b.ndim), self.axes
        ahead = (*range(most, most + n), *range(most))
        first = [values(x.reshape((1,) * (most - x.ndim) + x.shape), n).transpose(ahead) for x in (a, b)]
        x, y = first
        fold = tuple(k for k in range(n) if x.shape[k] > 1 and y.shape[k] == 1) if most == 2 else ()
        if not fold:
            return packed(self.of.matmul(x, y).transpose(*range(n, n + most), *range(n)), n)
        # one factor is the same on these lanes, such as a parameter on data parallel ranks: they are rows of one product
        rest = [k for k in range(n) if k not in fold]
        rows = x.transpose(*rest, *fold, n, n + 1)
        lead, folded = rows.shape[: len(rest)], rows.shape[len(rest) : n]
        found = self.of.matmul(rows.reshape(*lead, -1, x.shape[-1]), y.transpose(*rest, *fold, n, n + 1).reshape(*(y.shape[k] for k in rest), *y.shape[n:]))
        found = found.reshape(*found.shape[: len(rest)], *folded, x.shape[-2], y.shape[-1])
        back = [[*rest, *fold].index(k) for k in range(n)]
        return packed(found.transpose(n, n + 1, *back), n)

    def _short(self, a: Array, b: Array) -> Array:
        """Matrix products of which each element is a sum of few: element by element lanes stay where they are, and there is nothing to be turned round."""
        n, most = self.axes if a.dtype.names or b.dtype.names else 0, max(a.ndim, b.ndim)
        if n and lanes_of(a, n) != lanes_of(b, n):  # what is the same on some lanes is small beside the result, and long rows are quick
            both = common([lanes_of(a, n), lanes_of(b, n)], n)
            a, b = widened(a, both), widened(b, both)
        x, y = (values(v, n) if n else v for v in (a.reshape((1,) * (most - a.ndim) + a.shape), b.reshape((1,) * (most - b.ndim) + b.shape)))
        found = self.of.dot(np.expand_dims(x, most), np.expand_dims(y, most - 2), most - 1)
        return packed(found, n) if n else found

    def apply(self, name: str, *args: Array) -> Array:
        """A function."""
        if not any(a.dtype.names for a in args):
            return self.of.apply(name, *args)
        return packed(self.of.apply(name, *(values(a, self.axes) for a in args)), self.axes)

    def largest(self, a: Array, axis: int) -> Array:
        """The largest along an axis."""
        axis %= a.ndim
        return self._one(lambda x: self.of.largest(np.ascontiguousarray(x), axis), a)
