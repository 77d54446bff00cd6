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


class Scalars:
    """Which groups are multiples of others. An element of such a group is a number times the element at the same place of its core's group."""

    def __init__(self, domain: Applied) -> None:
        self._d = domain
        self._made: dict[tuple[int, int], int] = {}
        self._of: dict[int, tuple[int, int]] = {}  # group → (its core's group, constant)
        self._products: dict[tuple[int, int], int] = {}

    def value(self, x: int) -> Fraction | Root | None:
        """The number that an element is; None of -inf, and of what is no number."""
        group = int(self._d.groups_of(np.asarray(x)))
        found = self._d.groups[group] if self._d.is_const(group) else None
        return found if isinstance(found, Fraction | Root) else None

    def may(self, *arrays: Array) -> bool:
        """Whether numbers may be taken out: some elements are looked at, most arrays are all of one kind."""
        for a in arrays:
            flat = a.reshape(-1)
            if flat.size and all(self._plain(int(flat[k])) for k in {0, flat.size // 2, flat.size - 1}):
                continue
            return True
        return False

    def _plain(self, x: int) -> bool:
        if x <= ONE:
            return x == NINF
        group = int(self._d.groups_of(np.asarray(x)))
        return group not in self._of and not isinstance(self._d.groups[group], Fraction | Root)

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
        return self._d.base(found) - base

    def product(self, a: Array, b: Array) -> Array:
        """Of constants, one by one."""
        pairs, back = np.unique(np.stack([x.reshape(-1) for x in np.broadcast_arrays(a, b)], 1), axis=0, return_inverse=True)
        found = np.array([self._product(x, y) for x, y in pairs.tolist()], np.int64)
        return found[back.reshape(-1)].reshape(np.broadcast_shapes(a.shape, b.shape))

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

    def common(self, *arrays: Array) -> tuple[list[Array], int]:
        """Arrays without a number that is in front of them; constants are divided by it. ONE where there is none.

        Where elements have several, such as the gradients of queries and keys beside those of values, it is the smallest, so what is left is the same for arrays that are multiples of each other.
        """
        parts = [self.split(a) for a in arrays]
        numbers = list(dict.fromkeys(n for core, number in parts for n in _in_order(number[(core != ONE) & (number != ANY)])))
        if not numbers or numbers == [ONE] or any((a == NINF).any() for a in arrays):  # none: constants alone
            return list(arrays), ONE
        one = min(numbers, key=lambda n: abs(float(self._number(n))))
        if one == ONE:
            return list(arrays), ONE
        under = np.asarray(self._d.const(inverse(self._number(one))))
        return [self.times(core, self.product(number, under)) for core, number in parts], one

    def sums(self, rows: Array) -> Array | None:
        """Of fractions, along the last axis; None where there is something else."""
        distinct, back = np.unique(rows, return_inverse=True)
        values: list[Any] = [self.value(x) for x in distinct.tolist()]
        if not all(isinstance(v, Fraction) for v in values):
            return None
        lines, again = np.unique(back.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
        found = np.array([int(self._d.const(sum((values[k] for k in line), Fraction(0)))) for line in lines.tolist()], np.int64)
        return found[again.reshape(-1)].reshape(rows.shape[:-1])


def _in_order(numbers: Array) -> list[int]:
    """Those that there are, in the order in which they are first met."""
    found, first = np.unique(numbers, return_index=True)
    ordered: list[int] = found[np.argsort(first)].tolist()
    return ordered
