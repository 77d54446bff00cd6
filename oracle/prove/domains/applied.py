"""Formulas that are not written out: an element is one of the results of an operation on elements, and nothing is computed.

An operation on arrays gives new ids, unless the same operation was done on the same ids before; elements that one operation makes of the same ids, such as rows
of one token, have one id. So a step of any size costs what
moving its ids costs; what a formula says is written out where two of them have to be compared, a few operations deep (`proofs/lemma.py`).
What is simple enough is done at once: x + 0, x · 0, x · 1, and -inf; numbers in front are taken out (`scalars.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.poly import NINF, ONE, ZERO
from proctor.oracle.prove.domains.scalars import Scalars
from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array

CONST: Final = 0
LEAF: Final = 1
APPLIED: Final = 2


class Application:
    """An operation: its name, what it needs besides arrays, the arrays of ids, the shape of its result."""

    __slots__ = ("inputs", "op", "params", "shape")

    def __init__(self, op: str, params: tuple[Any, ...], inputs: tuple[Array, ...], shape: tuple[int, ...]) -> None:
        self.op, self.params, self.inputs, self.shape = op, params, inputs, shape


class Applied:
    """See the module. Ids come in groups, one for each operation, constant or array of inputs.

    Attributes:
        kinds: CONST, LEAF or APPLIED, by group.
        groups: an `Application`, or the value of a constant, by group.
        named: whether a group's elements are results of the reference, at which formulas are cut.
    """

    name = "applied"
    dtype = np.int64

    def __init__(self) -> None:
        self._bases = np.zeros(1024, np.int64)
        self._next = 0
        self.kinds = bytearray()
        self.named = bytearray()
        self.groups: list[Any] = []
        self._consts: dict[Any, int] = {}
        self._symbols: dict[int, int] = {}
        self._known: dict[tuple[Any, ...], Array] = {}
        self.scalars = Scalars(self)
        for value in (Fraction(0), -math.inf, Fraction(1)):  # ZERO, NINF, ONE
            self.const(value)

    def _group(self, kind: int, what: Any, count: int) -> int:
        n = len(self.groups)
        if n == len(self._bases):
            self._bases = np.concatenate([self._bases, np.zeros(n, np.int64)])
        base = self._bases[n] = self._next
        self._next += max(1, count)
        self.kinds.append(kind)
        self.named.append(0)
        self.groups.append(what)
        return int(base)

    def groups_of(self, ids: Array) -> Array:
        """The group of each id."""
        return np.searchsorted(self._bases[: len(self.groups)], ids, side="right") - 1

    def is_named(self, ids: Array) -> Array:
        """Which ids are results of the reference, or multiples of them."""
        groups, back = np.unique(self.groups_of(self.scalars.cores(ids)), return_inverse=True)
        return np.array([self.named[g] != 0 for g in groups.tolist()], bool)[back].reshape(ids.shape)

    def base(self, group: int) -> int:
        """The first id of a group."""
        return int(self._bases[group])

    def count(self, group: int) -> int:
        """How many ids a group has."""
        return int(self._bases[group + 1] if group + 1 < len(self.groups) else self._next) - self.base(group)

    def is_const(self, group: int) -> bool:
        """Whether it is a number."""
        return self.kinds[group] == CONST

    def multiple(self, base: int, count: int, number: int) -> int:
        """A new group: elements that follow each other, times a constant."""
        inputs = np.arange(base, base + count, dtype=np.int64), np.asarray(number, np.int64)
        self._group(APPLIED, Application("mul", (), inputs, (count,)), count)
        return len(self.groups) - 1

    def const(self, value: Fraction | Root | float) -> Any:
        """A number."""
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            value = Fraction(value)
        key = value if not isinstance(value, float) else str(value)
        if key not in self._consts:
            self._consts[key] = self._group(CONST, value, 1)
        return np.int64(self._consts[key])

    def symbol(self, keys: Array) -> Array:
        """An input a key."""
        flat = np.asarray(keys).reshape(-1)
        new = [k for k in dict.fromkeys(flat.tolist()) if k not in self._symbols]
        if new:
            base = self._group(LEAF, None, len(new))
            self._symbols.update(zip(new, range(base, base + len(new))))
        return np.array([self._symbols[k] for k in flat.tolist()], np.int64).reshape(np.shape(keys))

    def ints(self, values: Array) -> Array:
        """Integers."""
        found, back = np.unique(values, return_inverse=True)
        return np.array([self.const(Fraction(int(v))) for v in found.tolist()], np.int64)[back].reshape(np.shape(values))

    def _apply(self, op: str, params: tuple[Any, ...], inputs: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
        inputs = tuple(np.ascontiguousarray(a) for a in inputs)
        key = (op, params, *((a.shape, a.tobytes()) for a in inputs))
        found = self._known.get(key)
        if found is None:
            count = math.prod(shape)
            base = self._group(APPLIED, Application(op, params, tuple(a.copy() for a in inputs), shape), count)
            found = self._known[key] = np.asarray(base + _first_alike(op, params, inputs, shape)).reshape(shape)
            found.flags.writeable = False
        return found

    def _pairs(self, op: str, a: Array, b: Array, known: Any) -> Array:
        """An elementwise operation; `known` gives what some elements are at once, and which."""
        a, b = np.asarray(a), np.asarray(b)
        shape = np.broadcast_shapes(a.shape, b.shape)
        if not math.prod(shape):
            return np.zeros(shape, np.int64)
        if a.min() > ONE and b.min() > ONE:
            return self._apply(op, (), (a, b), shape)
        a, b = np.broadcast_to(a, shape), np.broadcast_to(b, shape)
        found, done = known(a, b)
        if done.all():
            return np.asarray(found)
        found = np.array(found)
        found[~done] = self._apply(op, (), (a[~done], b[~done]), (int((~done).sum()),))
        return found

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""

        def known(a: Array, b: Array) -> tuple[Array, Array]:
            lost = (a == NINF) | (b == NINF)
            return np.where(lost, NINF, np.where(a == ZERO, b, a)), lost | (a == ZERO) | (b == ZERO)

        return self._together(lambda a, b: self._pairs("add", a, b, known), np.asarray(a), np.asarray(b))

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""

        def known(a: Array, b: Array) -> tuple[Array, Array]:
            lost = (a == NINF) | (b == NINF)
            return np.where(lost, NINF, a), lost | (b == ZERO)

        return self._together(lambda a, b: self._pairs("sub", a, b, known), np.asarray(a), np.asarray(b))

    def _together(self, op: Callable[..., Array], *arrays: Array) -> Array:
        """An operation that a number in front of all elements goes through."""
        if not all(self.scalars.may(a) for a in arrays):
            return op(*arrays)
        parts, number = self.scalars.common(*arrays)
        return op(*parts) if number == ONE else self.mul(op(*parts), np.asarray(number, np.int64))

    def mul(self, a: Array, b: Array) -> Array:
        """a · b."""

        def known(a: Array, b: Array) -> tuple[Array, Array]:
            none = (a == ZERO) | (b == ZERO)
            lost = (a == NINF) | (b == NINF)
            return np.where(none, ZERO, np.where(lost, NINF, np.where(a == ONE, b, a))), none | lost | (a == ONE) | (b == ONE)

        a, b = np.asarray(a), np.asarray(b)
        if not self.scalars.may(a, b):
            return self._pairs("mul", a, b, known)
        (x, m), (y, n) = self.scalars.split(a), self.scalars.split(b)
        return self.scaled(self._pairs("mul", x, y, known), self.scalars.product(m, n))

    def scaled(self, a: Array, numbers: Array) -> Array:
        """Elements times constants, which `scalars.split` gives."""
        core, inner = self.scalars.split(a)
        return self.scalars.times(core, self.scalars.product(inner, numbers))

    def square(self, a: Array) -> Array:
        """a²."""
        a = np.asarray(a)
        if not self.scalars.may(a):
            return self._alone("square", a, {ZERO: ZERO, ONE: ONE})
        core, number = self.scalars.split(a)
        return self.scaled(self._alone("square", core, {ZERO: ZERO, ONE: ONE}), self.scalars.product(number, number))

    def inv(self, a: Array) -> Array:
        """1 / a."""
        a = np.asarray(a)
        if (a <= NINF).any() or not self.scalars.may(a):
            return self._alone("inv", a, {ONE: ONE})
        core, number = self.scalars.split(a)
        return self.scaled(self._alone("inv", core, {ONE: ONE}), self.scalars.inverse(number))

    def _alone(self, op: str, a: Array, known: dict[int, int], params: tuple[Any, ...] = ()) -> Array:
        a = np.asarray(a)
        if not a.size or a.min() > ONE:
            return self._apply(op, params, (a,), a.shape)
        found, rest = np.array(a), np.ones(a.shape, bool)
        for x, y in known.items():
            found[a == x], rest[a == x] = y, False
        if rest.any():
            found[rest] = self._apply(op, params, (a[rest],), (int(rest.sum()),))
        return found

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes."""
        a = np.asarray(a)
        shape = tuple(1 if k in axes else n for k, n in enumerate(a.shape)) if keep else tuple(n for k, n in enumerate(a.shape) if k not in axes)
        if not a.any():  # all 0
            return np.zeros(shape, np.int64)
        if math.prod(a.shape[k] for k in axes) == 1:
            return a.reshape(shape)
        if self.scalars.may(a):
            kept = [k for k in range(a.ndim) if k not in axes]
            if (found := self.scalars.sums(a.transpose(*kept, *axes).reshape(math.prod(shape), -1))) is not None:
                return found.reshape(shape)
        return self._together(lambda a: self._apply("sum", (axes, keep), (a,), shape), a)

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products."""
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        if not (a.any() and b.any()):
            return np.zeros(shape, np.int64)
        return self._together(lambda a: self._together(lambda b: self._apply("matmul", (), (a, b), shape), b), a)

    def apply(self, name: str, *args: Array) -> Array:
        """A function; of -inf and of 0 what is known."""
        if len(args) == 1:
            known = {"exp": {ZERO: ONE, NINF: ZERO}, "log": {ONE: ZERO, ZERO: NINF}}.get(name)
            if known is None:
                known = {ZERO: ZERO} if name in ("sqrt", "relu", "abs", "tanh", "sin", "erf", "sign") else {}
            return self._alone("apply", args[0], known, (name,))
        arrays = np.broadcast_arrays(*args)
        return self._apply("apply", (name,), tuple(arrays), arrays[0].shape)

    def largest(self, a: Array, axis: int) -> Array:
        """The largest along an axis."""
        axis %= a.ndim
        return self._apply("largest", (axis,), (a,), tuple(n for k, n in enumerate(a.shape) if k != axis))


def _first_alike(op: str, params: tuple[Any, ...], inputs: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """For each element of a result the number of the first one that is made of the same elements in the same way."""
    if op == "matmul":
        a, b = inputs
        lead = shape[:-2]
        rows = _numbered(np.broadcast_to(a, (*lead, *a.shape[-2:])).reshape(-1, a.shape[-1])).reshape(*lead, shape[-2], 1)
        columns = _numbered(np.broadcast_to(b, (*lead, *b.shape[-2:])).swapaxes(-1, -2).reshape(-1, b.shape[-2])).reshape(*lead, 1, shape[-1])
        parts = [np.broadcast_to(n, shape).reshape(-1, 1) for n in (rows, columns)]
    elif op in ("sum", "largest"):
        a, axes = inputs[0], params[0] if op == "sum" else params
        kept = [k for k in range(a.ndim) if k not in axes]
        parts = [a.transpose(*kept, *axes).reshape(math.prod(shape), -1)]
    else:
        parts = [(a if a.size == math.prod(shape) else np.broadcast_to(a, shape)).reshape(-1, 1) for a in inputs]
    return _numbered(np.concatenate(parts, 1) if len(parts) > 1 else parts[0])


def _numbered(rows: Array) -> Array:
    """For each row the number of the first one like it."""
    if not rows.shape[1]:
        return np.zeros(len(rows), np.int64)
    if rows.shape[1] == 1:
        flat: Array = rows.reshape(-1)
    else:
        flat = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
    _, first, back = np.unique(flat, return_index=True, return_inverse=True)
    return np.asarray(first[back.reshape(-1)], np.int64)
