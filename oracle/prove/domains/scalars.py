"""Numbers are taken out of formulas that are not written out: 4 · x is kept as 4 and x, so what is linear in x is the same operation on the same elements.

A loss that is divided by the number of microbatches and gradients that are divided by it later are then one formula but for a number in front.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from proctor.oracle.prove.domains.poly import NINF, ONE, ZERO
from proctor.oracle.prove.numbers import Root, inverse, product
from proctor.oracle.prove.tape import Array

if TYPE_CHECKING:
    from proctor.oracle.prove.domains.applied import Applied

ANY: Final = -1  # 0 is any number times 0
CONST: Final = 0  # as `applied.py` calls it
_TAKEN: Final = 1
_FRACTION: Final = 2


class Scalars:
    """Which groups are multiples of others. An element of such a group is a number times the element at the same place of its core's group."""

    def __init__(self, domain: Applied) -> None:
        self._d = domain
        self._made: dict[tuple[int, int], int] = {}
        self._of: dict[int, tuple[int, int]] = {}  # group → (its core's group, constant)
        self._products: dict[tuple[int, int], int] = {}
        self.flags = bytearray()  # by group: a multiple, or a number other than 0 and 1; a fraction

    def value(self, x: int) -> Fraction | Root | None:
        """The number that an element is; None of -inf, and of what is no number."""
        group = int(self._d.groups_of(np.asarray(x)))
        found = self._d.groups[group] if self._d.is_const(group) else None
        return found if isinstance(found, Fraction | Root) else None

    def may(self, *arrays: Array) -> bool:
        """Whether there are numbers to be taken out."""
        return any(bool((self._flags_of(a) & _TAKEN).any()) for a in arrays)

    def _flags_of(self, a: Array) -> Array:
        return np.asarray(np.frombuffer(self.flags, np.uint8)[self._d.groups_of(a)])  # a copy: what is looked into may not grow

    def flag(self, kind: int, what: Any) -> None:
        """Called for each new group."""
        number = kind == CONST and isinstance(what, Fraction | Root)
        self.flags.append((_TAKEN if number and what not in (0, 1) else 0) | (_FRACTION if number and isinstance(what, Fraction) else 0))

    def split(self, a: Array) -> tuple[Array, Array]:
        """(elements without their numbers, the numbers as constants); a constant is a number times 1."""
        groups, back = np.unique(self._d.groups_of(a), return_inverse=True)
        shift, numbers = np.zeros(len(groups), np.int64), np.full(len(groups), ONE, np.int64)
        for k, group in enumerate(groups.tolist()):
            if group in self._of:
                core, numbers[k] = self._of[group]
                shift[k] = self._d.base(core) - self._d.base(group)
            elif isinstance(self._d.groups[group], Fraction | Root):
                base = self._d.base(group)
                shift[k], numbers[k] = (0, ANY) if base == ZERO else (ONE - base, base)
        back = back.reshape(a.shape)
        return np.asarray(a + shift[back]), numbers[back]

    def cores(self, a: Array) -> Array:
        """Elements without their numbers."""
        return self.split(a)[0] if self._of else a

    def times(self, a: Array, numbers: Array) -> Array:
        """Elements that have no numbers, each times a constant."""
        a, numbers = np.broadcast_arrays(a, numbers)
        found = a.copy()
        todo = (a != ZERO) & (a != NINF) & (numbers != ONE) & (numbers != ANY)
        if not todo.any():
            return found
        groups = self._d.groups_of(a)
        pairs, back = np.unique(np.stack([groups[todo], numbers[todo]], 1), axis=0, return_inverse=True)
        shift = np.array([self._multiple(g, n) for g, n in pairs.tolist()], np.int64)
        found[todo] += shift[back.reshape(-1)]
        return found

    def _multiple(self, group: int, number: int) -> int:
        """How far the multiples of a group's elements are from them."""
        base = self._d.base(group)
        if base == ONE:
            return number - ONE
        found = self._made.get((group, number))
        if found is None:
            found = self._made[group, number] = self._d.multiple(base, self._d.count(group), number)
            self._of[found] = group, number
            self.flags[found] = _TAKEN
        return self._d.base(found) - base

    def product(self, a: Array, b: Array) -> Array:
        """Of constants, one by one."""
        a, b = np.broadcast_arrays(a, b)
        for one, other in ((a, b), (b, a)):
            if (other == ONE).all():
                return np.asarray(one)
        (left, first), (right, second) = (np.unique(x, return_inverse=True) for x in (a, b))
        pairs, back = np.unique(first.reshape(-1) * len(right) + second.reshape(-1), return_inverse=True)
        found = np.array([self._product(int(left[k // len(right)]), int(right[k % len(right)])) for k in pairs.tolist()], np.int64)
        return np.asarray(found[back.reshape(-1)].reshape(a.shape))

    def _product(self, x: int, y: int) -> int:
        if ANY in (x, y):
            return ANY
        if (x, y) not in self._products:
            self._products[x, y] = int(self._d.const(product(self._number(x), self._number(y))))
        return self._products[x, y]

    def inverse(self, a: Array) -> Array:
        """1 / a of constants."""
        found, back = np.unique(a, return_inverse=True)
        return np.array([int(self._d.const(inverse(self._number(x)))) for x in found.tolist()], np.int64)[back].reshape(a.shape)

    def _number(self, x: int) -> Fraction | Root:
        found = self.value(x)
        assert found is not None
        return found

    def taken_out(self, rows: Array, every: bool = False) -> tuple[Array, Array]:
        """Rows without the number that is in front of each, and these numbers; constants in a row are divided by it.

        Where elements of a row have several, such as the gradients of queries and keys beside those of values, it is the smallest, so what is left is the same for rows that are multiples of each other,
        whatever stands beside them in an array.

        Args:
            every: a row in which an element has no number stays: such as x + log s, which laws of exp are about.
        """
        core, number = self.split(rows)
        distinct, back = np.unique(number, return_inverse=True)
        sizes = np.array([np.inf if n == ANY else abs(float(self._number(n))) for n in distinct.tolist()])[back.reshape(number.shape)]
        sizes[(core == ONE) | (rows == NINF)] = np.inf
        at = sizes.argmin(1, keepdims=True)
        plain = ((number == ONE) & (core != ONE)).any(1, keepdims=True)
        none = (plain & every) | np.isinf(np.take_along_axis(sizes, at, 1)) | (rows == NINF).any(1, keepdims=True)
        found = np.where(none, ONE, np.take_along_axis(number, at, 1))
        return (rows if (found == ONE).all() else self.times(core, self.product(number, self.inverse(found)))), found[:, 0]

    def sums(self, rows: Array) -> tuple[Array, Array]:
        """What rows of fractions add up to; which rows these are."""
        found = np.zeros(len(rows), np.int64)
        done = (self._flags_of(rows) & _FRACTION).astype(bool).all(1)
        if done.any():
            lines, back = np.unique(rows[done], axis=0, return_inverse=True)
            values: list[list[Any]] = [[self.value(x) for x in line] for line in lines.tolist()]
            found[done] = np.array([int(self._d.const(sum(line, Fraction(0)))) for line in values])[back.reshape(-1)]
        return found, np.asarray(done)
