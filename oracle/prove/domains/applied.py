"""Formulas that are not written out: an element is one of the results of an operation on elements, and nothing is computed.

An operation on arrays gives new ids; elements that the same operation made of the same ids before (`interned.py`), such as rows
of one token, or of a part of the batch, have the ids that they had. So a step of any size costs what
moving its ids costs; what a formula says is written out where two of them have to be compared, a few operations deep (`proofs/lemma.py`).
What is simple enough is done at once: x + 0, x · 0, x · 1, and -inf; numbers in front are taken out (`scalars.py`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.interned import Interned
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
        self._interned = Interned()
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
        self.scalars.flag(kind, what)
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
            keys, flat, known = self._interned.find(op, params, inputs, shape)
            if (new := np.flatnonzero(flat < 0)).size:
                base = self._group(APPLIED, Application(op, params, tuple(a.copy() for a in inputs), shape), math.prod(shape))
                distinct, first, back = np.unique(keys[new], return_index=True, return_inverse=True)
                ids = base + new[first]
                flat[new] = ids[back]
                self._interned.keep(known, distinct, ids)
            found = self._known[key] = flat.reshape(shape)
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

        return self._together("add", np.asarray(a), np.asarray(b), known)

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""

        def known(a: Array, b: Array) -> tuple[Array, Array]:
            lost = (a == NINF) | (b == NINF)
            return np.where(lost, NINF, a), lost | (b == ZERO)

        return self._together("sub", np.asarray(a), np.asarray(b), known)

    def _together(self, op: str, a: Array, b: Array, known: Any) -> Array:
        """An elementwise operation that a number in front of both elements goes through."""
        if not (self.scalars.may(a) and self.scalars.may(b)):
            return self._pairs(op, a, b, known)
        a, b = np.broadcast_arrays(a, b)
        rows, numbers = self.scalars.taken_out(np.stack([a.reshape(-1), b.reshape(-1)], 1), every=True)
        found = self._pairs(op, rows[:, 0].reshape(a.shape), rows[:, 1].reshape(a.shape), known)
        return self.scaled(found, numbers.reshape(a.shape))

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
        kept = [k for k in range(a.ndim) if k not in axes]
        rows = a.transpose(*kept, *axes).reshape(math.prod(shape), -1)
        found, done = self.scalars.sums(rows)
        if not done.all():
            (rows, numbers) = self.scalars.taken_out(rows[~done]) if self.scalars.may(rows[~done]) else (rows[~done], np.asarray(ONE))
            found[~done] = self.scaled(self._apply("sum", ((1,), False), (rows,), (len(rows),)), numbers)
        return found.reshape(shape)

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products."""
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        if not (a.any() and b.any()):
            return np.zeros(shape, np.int64)
        if not self.scalars.may(a, b):
            return self._apply("matmul", (), (a, b), shape)
        b = b.swapaxes(-1, -2)
        (rows, m), (columns, n) = (self.scalars.taken_out(x.reshape(-1, x.shape[-1])) for x in (a, b))
        found = self._apply("matmul", (), (rows.reshape(a.shape), columns.reshape(b.shape).swapaxes(-1, -2)), shape)
        return self.scaled(found, self.scalars.product(m.reshape(a.shape[:-1])[..., None], n.reshape(b.shape[:-1])[..., None, :]))

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
