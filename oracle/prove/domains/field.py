"""A finite field of 2³¹ - 1 elements: what differs here differs as a formula; what agrees does so but for a probability.

Inputs and parameters are random elements, functions without laws a random oracle (64-bit mix, keyed by seed and name). Two
formulas of degree d that differ agree with probability about d/p; two seeds square that. One element, NINF, stands
for -inf: it absorbs what is added, and its exponential is 0. The largest of a set is that of a random order: a
semilattice, of which nothing else is used.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array

P: Final = 2**31 - 1
NINF: Final = -1
_BLOCK: Final = 64  # terms of 2^16 · 2^31 that a double sums exactly: 2^53 / 2^47
_FEW: Final = 2048  # elements up to which a division is quicker than more operations
_CACHED: Final = 16384  # elements that are worked on at a time
_PRIME: Final = np.uint64(P)
_SMALL: Final = 256  # roots of more elements than norms have are not kept: by chance one would be met again


class Field:
    """See the module. `seed`: of the random elements."""

    name = "field"
    dtype = np.int64

    def __init__(self, seed: int) -> None:
        self.seed = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
        self._roots: dict[int, int] = {}
        self._consts: dict[Any, Any] = {}

    def const(self, value: Fraction | Root | float) -> Any:
        """The element of a number."""
        key = value if not isinstance(value, float) else str(value)
        if key not in self._consts:
            self._consts[key] = self._const(value)
        return self._consts[key]

    def _const(self, value: Fraction | Root | float) -> Any:
        if isinstance(value, Root):
            return self._root(value)
        if isinstance(value, float):
            if value == -math.inf:
                return np.int64(NINF)
            if not math.isfinite(value):
                return self.symbol(np.array([hash(str(value)) & 0x7FFFFFFF]))[0]
            value = Fraction(value)
        if value.denominator % P == 0:
            return self.symbol(np.array([value.numerator & 0x7FFFFFFF]))[0]
        return np.int64(value.numerator % P * pow(value.denominator, -1, P) % P)

    def _root(self, value: Root) -> Any:
        """Where a number has a root that is a square itself, that one, so that products of roots are right; else a symbol."""
        if value.negative:
            return self.mul(np.array([self.const(Root(value.of, value.degree))]), np.array([P - 1]))[0]
        square = int(self.const(value.of if value.degree == 2 else Root(value.of, 2)))
        if pow(square, (P - 1) // 2, P) == 1:
            return np.int64(pow(square, (P + 1) // 4, P))
        found = self.apply("sqrt", np.array([square]))[0]
        return found

    def symbol(self, keys: Array) -> Array:
        """A random element a key."""
        return self._mix(keys.astype(np.int64).view(np.uint64), np.uint64(0x5851F42D4C957F2D))

    def ints(self, values: Array) -> Array:
        """Modulo p."""
        return np.asarray(np.mod(values.astype(np.int64), P))

    def add(self, a: Array, b: Array) -> Array:
        """a + b; NINF if one is."""
        return _absorbing(_lowered(a + b), a, b)

    def sub(self, a: Array, b: Array) -> Array:
        """a - b; NINF if one is."""
        return _absorbing(_lifted(a - b), a, b)

    def mul(self, a: Array, b: Array) -> Array:
        """a · b; NINF if one is, but for a factor of 0."""
        found = _absorbing(_reduced(a * b), a, b, zero=True)
        if self._roots and found.size <= _SMALL:
            self._multiplied(np.asarray(a), np.asarray(b), found)
        return found

    def _multiplied(self, a: Array, b: Array, found: Array) -> None:
        """A multiple of a root is a root, too."""
        if not (self._rooted(a) or self._rooted(b)):
            return
        a, b = np.broadcast_arrays(a, b)
        for x, y, z in zip(a.ravel().tolist(), b.ravel().tolist(), found.ravel().tolist()):
            if (x in self._roots or y in self._roots) and x > 0 and y > 0:
                self._roots.setdefault(z, self._roots.get(x, x * x % P) * self._roots.get(y, y * y % P) % P)

    def _rooted(self, a: Array) -> bool:
        """Whether all elements are roots: a single one may be met by chance, in a long step with many roots."""
        return bool(a.size) and int(a.flat[0]) in self._roots and all(x in self._roots for x in a.ravel().tolist())

    def square(self, a: Array) -> Array:
        """a², and of a root what it is the root of."""
        found = self.mul(a, a)
        if not self._roots or a.size > _SMALL or not self._rooted(np.asarray(a)):
            return found
        flat = [self._roots.get(x, y) for x, y in zip(np.ravel(a).tolist(), np.ravel(found).tolist())]
        return np.array(flat, np.int64).reshape(np.shape(a))

    def inv(self, a: Array) -> Array:
        """By Fermat; of 0 an element of its own."""
        a = np.asarray(a)
        found = _inverses(np.where(a <= 0, 1, a).reshape(-1)).reshape(a.shape)
        return np.where(a <= 0, np.where(a < 0, 0, self.symbol(np.array([77]))[0]), found)

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes."""
        found = np.asarray(a.sum(axis=axes, keepdims=keep)) % P
        if a.size and a.min() < 0:
            return np.where((a < 0).any(axis=axes, keepdims=keep), NINF, found)
        return found

    def matmul(self, a: Array, b: Array) -> Array:
        """Exact in doubles: one factor in 16-bit halves, blocks of the contraction."""
        if not a.shape[-1]:
            return np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.int64)
        a, b = _without_ninf(a), _without_ninf(b)
        b64 = b.astype(np.float64, order="C")  # as BLAS wants it
        rows = a.shape[-2]
        halves = np.empty((*a.shape[:-2], 2 * rows, a.shape[-1]), np.float64)
        halves[..., :rows, :], halves[..., rows:, :] = a & 0xFFFF, a >> 16
        total: Array | None = None
        for k in range(0, a.shape[-1], _BLOCK):
            found = (halves[..., k : k + _BLOCK] @ b64[..., k : k + _BLOCK, :]).astype(np.int64)
            upper = _reduced(found[..., rows:, :])
            upper <<= 16
            upper += found[..., :rows, :]
            if total is not None:
                upper += total
            total = _reduced(upper)
        return np.asarray(total)

    def dot(self, a: Array, b: Array, axis: int) -> Array:
        """As many at a time as a processor's cache holds."""
        a, b = _without_ninf(a), _without_ninf(b)
        shape = np.broadcast_shapes(a.shape[:axis] + a.shape[axis + 1 :], b.shape[:axis] + b.shape[axis + 1 :])
        each = max(1, _CACHED * shape[0] // max(1, math.prod(shape))) if axis and shape else 0
        if not each or each >= shape[0]:
            return _dot(a, b, axis)
        found = np.empty(shape, np.int64)
        for k in range(0, shape[0], each):
            some = slice(k, k + each)
            found[some] = _dot(a[some] if a.shape[0] > 1 else a, b[some] if b.shape[0] > 1 else b, axis)
        return found

    def apply(self, name: str, *args: Array) -> Array:
        """A random oracle; exp and log know 0 and 1, roots are remembered."""
        shape = np.broadcast_shapes(*(np.shape(a) for a in args))
        key = np.full(shape, _key(name), np.uint64)
        for a in args:
            key = self._mix(np.asarray(a, np.int64).view(np.uint64) ^ _rotated(key), np.uint64(0x2545F4914F6CDD1D), wide=True)
        found = (key % np.uint64(P)).astype(np.int64)
        first = np.asarray(args[0])
        if name == "exp":
            found = np.where(first == 0, 1, np.where(first < 0, 0, found))
        elif name == "log":
            found = np.where(first == 1, 0, np.where(first == 0, NINF, found))
        elif name == "sqrt":
            found = np.where((first == 0) | (first == 1), first, found)
            if first.size <= _SMALL:
                self._roots.update(zip(np.ravel(found).tolist(), np.ravel(first).tolist()))
        elif name in ("relu", "abs", "tanh", "sin", "erf", "sign"):
            found = np.where(first == 0, 0, found)
        return found

    def largest(self, a: Array, axis: int) -> Array:
        """The first of a random order."""
        if not a.shape[axis]:
            raise NotImplementedError("the largest of nothing")
        order = self._mix(a.view(np.uint64) if a.flags.c_contiguous else a.copy().view(np.uint64), np.uint64(0x9FB21C651E98DF25), wide=True)
        order = np.where(a < 0, np.uint64(0), order | np.uint64(1))
        at = np.expand_dims(order.argmax(axis=axis), axis)
        return np.asarray(np.take_along_axis(a, at, axis).squeeze(axis))

    def _mix(self, x: Any, salt: Any, wide: bool = False) -> Array:
        with np.errstate(over="ignore"):
            x = (x ^ self.seed) + salt
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return x if wide else (x % np.uint64(P)).astype(np.int64)  # type: ignore[no-any-return]


def _inverses(a: Array) -> Array:
    """Of elements that are not 0: of products of two, then of these two, so that there is one power for all."""
    if a.size == 1:
        return np.array([pow(int(a[0]), P - 2, P)], np.int64)
    if not a.size:
        return a
    even = np.concatenate([a, np.ones(1, np.int64)]) if a.size % 2 else a
    one, two = np.split(even, 2)
    both = _inverses(_reduced(one * two))
    return np.concatenate([_reduced(both * two), _reduced(both * one)])[: a.size]


def _dot(a: Array, b: Array, axis: int) -> Array:
    """By the way, two products at once: they are below 2p², which is below 2⁶³."""
    total: Array | None = None
    for k in range(0, a.shape[axis], 2):
        found = a.take(k, axis) * b.take(k, axis)
        if k + 1 < a.shape[axis]:
            found += a.take(k + 1, axis) * b.take(k + 1, axis)
            bits = found.view(np.uint64)
            np.minimum(bits, bits - np.uint64(P * P), out=bits)  # p² is 0, and as numbers without a sign those below 0 are the largest
        found = _reduced(found)
        total = found if total is None else _lowered(total + found)
    return np.asarray(total)


def _reduced(product: Any) -> Array:
    """A number up to p², below p: 2³¹ is 1, so what is above the lowest 31 bits is added to them. As of `_lowered`, it is put in the place of what is given."""
    if product.size < _FEW:
        return np.asarray(product % P)
    high = product >> 31
    product &= P
    product += high
    return _least(product, np.subtract(product.view(np.uint64), _PRIME, out=high.view(np.uint64)))


def _lowered(found: Any) -> Array:
    """What is below 2p, below p. Without a comparison: as numbers without a sign, those below 0 are the largest."""
    if found.size < _FEW:
        return np.asarray(found % P)
    return _least(found, found.view(np.uint64) - _PRIME)


def _lifted(found: Any) -> Array:
    """What is not below -p, from 0."""
    if found.size < _FEW:
        return np.asarray(found % P)
    return _least(found, found.view(np.uint64) + _PRIME)


def _least(found: Any, other: Any) -> Array:
    """As numbers without a sign."""
    bits = found.view(np.uint64)
    np.minimum(bits, other, out=bits)
    return np.asarray(found)


def _without_ninf(a: Array) -> Array:
    """NINF as the element that it is in a product of matrices."""
    return np.where(a < 0, P - 1, a) if a.size and a.min() < 0 else a


def _absorbing(found: Array, a: Array, b: Array, zero: bool = False) -> Array:
    if (a.size and a.min() < 0) or (b.size and b.min() < 0):
        lost = (a < 0) | (b < 0)
        if zero:
            lost = lost & (a != 0) & (b != 0)
            found = np.where((a == 0) | (b == 0), 0, found)
        return np.where(lost, NINF, found)
    return np.asarray(found)


def _key(name: str) -> Any:
    import hashlib

    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _rotated(x: Array) -> Array:
    return (x << np.uint64(17)) | (x >> np.uint64(47))
