"""Interned polynomials over the rationals in atoms: equal ids are equal formulas. This is the proof.

An atom is an input, a function of which nothing is known applied to ids, or a *name*: `Poly.name` puts one atom in the place of
a polynomial of several terms, up to a factor, once and for all, so formulas stay small; equal polynomials get equal names, and
nothing is assumed. Laws: a commutative ring; x · 1/x = 1 for products of atoms; √x · √x = x; exp(x + c · log s) = exp(x) · s^c and
exp(x + c · max) = exp(x) · exp(max)^c, so that what softmax subtracts cancels; log(exp(x) · s) = x + log s; the largest of a set of
sets. An equality that needs what a name hides is not found: unproved, never wrong.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.domains.powers import Whole, alone, folded, small, whole_part
from proctor.oracle.prove.domains.vanish import Differences
from proctor.oracle.prove.numbers import Root, primes
from proctor.oracle.prove.tape import Array

Number = int | Fraction
Terms = tuple[tuple[int, Number], ...]  # (monomial, coefficient), by monomial
Factors = tuple[tuple[int, Number], ...]  # (atom, exponent), by atom; only powers of e have exponents that are not whole

ZERO: Final = 0
NINF: Final = 1
ONE: Final = 2
_LONG: Final = 20_000  # products of terms, some hundredths of a second
_UNIT: Final = 0  # the empty monomial


class OutOfBudget(Exception):
    """More terms, or more time, than were allowed."""


# More than 25 methods: one for each operation that a domain of `prove` has, all on one table of monomials and atoms.
class Poly:
    """See the module. `budget`: terms that may be stored; `until`: when it ends, by `time.process_time`."""

    name = "poly"
    dtype = np.int64

    def __init__(self, budget: int = 20_000_000, until: float = math.inf) -> None:
        self._budget, self._until, self._work = budget, until, 10 * budget
        self.polys: list[Terms] = []
        self._ids: dict[Terms, int] = {}
        self.monomials: list[Factors] = [()]
        self._monomial_ids: dict[Factors, int] = {(): _UNIT}
        self._products: dict[tuple[int, int], int] = {}
        self._whole: Whole = {}
        self.atoms: list[tuple[Any, ...]] = []
        self._atom_ids: dict[tuple[Any, ...], int] = {}
        self._computed: dict[str, dict[int, int]] = defaultdict(dict)
        self._dots: dict[tuple[int, ...], int] = {}
        self._differences = Differences(self)
        self._parts: dict[int, tuple[Number, int, int]] = {}
        for terms in ((), ((-1, 1),), ((_UNIT, 1),)):  # zero, -inf, one
            self._intern(terms)

    def _intern(self, terms: Terms) -> int:
        if (found := self._ids.get(terms)) is None:
            self._budget -= len(terms)
            if self._budget < 0:
                raise OutOfBudget("more terms than the budget allows")
            if len(self.polys) % 64 == 63:
                self.look_at_the_time()
            found = self._ids[terms] = len(self.polys)
            self.polys.append(terms)
        return found

    def look_at_the_time(self) -> None:
        """Raise OutOfBudget when there is none left."""
        if time.process_time() > self._until:
            raise OutOfBudget("more time than the budget allows")

    def _of(self, terms: dict[int, Number]) -> int:
        return self._intern(tuple(sorted((m, c) for m, c in self.folded(terms).items() if c)))

    def _atom(self, what: tuple[Any, ...]) -> int:
        found = self._atom_ids.get(what)
        if found is None:
            found = self._atom_ids[what] = len(self.atoms)
            self.atoms.append(what)
        return found

    def monomial(self, factors: Factors) -> int:
        """The number of a product of powers of atoms."""
        found = self._monomial_ids.get(factors)
        if found is None:
            found = self._monomial_ids[factors] = len(self.monomials)
            self.monomials.append(factors)
            if (whole := whole_part(factors, self.atoms)) is not None:
                self._whole[found] = self.monomial(whole[0]), whole[1]
        return found

    def folded(self, terms: dict[int, Number]) -> dict[int, Number]:
        """Terms in which no power of a prime is a whole number."""
        return terms if not self._whole or self._whole.keys().isdisjoint(terms) else folded(terms, self._whole)

    def _single(self, what: tuple[Any, ...]) -> int:
        return self._intern(((self.monomial(((self._atom(what), 1),)), 1),))

    def const(self, value: Fraction | Root | float) -> Any:
        """A number."""
        if isinstance(value, Root):
            over, powers = primes(value)
            return np.int64(self._of({self.monomial(tuple(sorted((self._atom(("prime", p)), e) for p, e in powers.items()))): small(over)}))
        if isinstance(value, float):
            if value == -math.inf:
                return np.int64(NINF)
            if not math.isfinite(value):
                return np.int64(self._single(("number", str(value))))
            value = Fraction(value)
        return np.int64(self._of({_UNIT: int(value) if value.denominator == 1 else value}))

    def symbol(self, keys: Array) -> Array:
        """One atom a key."""
        values, back = np.unique(keys, return_inverse=True)
        return np.array([self._single(("input", k)) for k in values.tolist()], np.int64)[back].reshape(keys.shape)

    def ints(self, values: Array) -> Array:
        """Integers."""
        found, back = np.unique(values, return_inverse=True)
        return np.array([self.const(Fraction(int(v))) for v in found.tolist()], np.int64)[back].reshape(values.shape)

    def _pairs(self, op: Callable[[int, int], int], a: Array, b: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        values, back = np.unique((a.astype(np.int64) << 32) | b, return_inverse=True)
        known = self._computed[op.__name__]  # replicas compute what others have computed
        found = np.array([known[v] if v in known else known.setdefault(v, op(v >> 32, v & 0xFFFFFFFF)) for v in values.tolist()], np.int64)
        return found[back].reshape(a.shape) if found.size else np.zeros(a.shape, np.int64)

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        return self._pairs(self._plus, np.asarray(a), np.asarray(b))

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""
        return self._pairs(self._minus, np.asarray(a), np.asarray(b))

    def mul(self, a: Array, b: Array) -> Array:
        """a · b."""
        return self._pairs(self._times, np.asarray(a), np.asarray(b))

    def _minus(self, x: int, y: int) -> int:
        return self._plus(x, y, -1)

    def _plus(self, x: int, y: int, sign: int = 1) -> int:
        if x == NINF or y == NINF:
            return NINF
        if y == ZERO:
            return x
        terms = dict(self.polys[x])
        for m, c in self.polys[y]:
            terms[m] = terms.get(m, 0) + sign * c
        return self._of(terms)

    def _times(self, x: int, y: int) -> int:
        if x == ZERO or y == ZERO:
            return ZERO
        if x == NINF or y == NINF:
            return NINF
        if x == ONE or y == ONE:
            return y if x == ONE else x
        terms: dict[int, Number] = {}
        self._accumulate(terms, x, y)
        return self._of(terms)

    def _accumulate(self, terms: dict[int, Number], x: int, y: int) -> None:
        many = len(self.polys[x]) * len(self.polys[y])
        self._work -= many
        if self._work < 0:
            raise OutOfBudget("more products than the budget allows")
        for m, c in self.polys[x]:
            if many > _LONG:
                self.look_at_the_time()
            for n, e in self.polys[y]:
                p = self.product(m, n)
                terms[p] = terms.get(p, 0) + c * e

    def product(self, m: int, n: int) -> int:
        """Of two monomials."""
        if m == _UNIT:
            return n
        if n == _UNIT:
            return m
        key = (m, n) if m <= n else (n, m)
        if (found := self._products.get(key)) is None:
            factors = dict(self.monomials[m])
            for atom, power in self.monomials[n]:
                factors[atom] = factors.get(atom, 0) + power
            found = self._products[key] = self.monomial(tuple(sorted((a, p) for a, p in factors.items() if p)))
        return found

    def square(self, a: Array) -> Array:
        """a²; the square of a root is what it is the root of."""
        return self.each(self._squared, a)

    def _squared(self, x: int) -> int:
        if len(self.polys[x]) != 1 or x == NINF:
            return self._times(x, x)
        (m, c) = self.polys[x][0]
        found = self._of({self.monomial(tuple((a, 2 * p) for a, p in self.monomials[m] if self.atoms[a][0] != "sqrt")): c * c})
        for a, p in self.monomials[m]:
            if self.atoms[a][0] == "sqrt":
                inner = self._opened(self.atoms[a][1])
                for _ in range(abs(int(p))):
                    found = self._times(found, inner if p > 0 else self._inverse(inner))
        return found

    def inv(self, a: Array) -> Array:
        """1 / a."""
        return self.each(self._inverse, a)

    def _inverse(self, x: int) -> int:
        terms = self.polys[x]
        if x in (ZERO, NINF):
            return self._single(("1/0",))
        if len(terms) == 1:
            m, c = terms[0]
            return self._of({self.monomial(tuple((a, -p) for a, p in self.monomials[m])): small(1 / Fraction(c))})
        c, m, q = self._projected(x)
        inverse = self.monomial(tuple((a, -p) for a, p in self.monomials[m]))
        return self._of({self.product(inverse, self.monomial(((self._atom(("sum", q)), -1),))): small(1 / Fraction(c))})

    def _projected(self, x: int) -> tuple[Number, int, int]:
        """A factor, the product of what all terms have in common, and the polynomial without them: its first coefficient is 1."""
        found = self._parts.get(x)
        if found is None:
            terms = self.polys[x]
            m = self._common(terms)
            if m != _UNIT:
                without = self.monomial(tuple((a, -p) for a, p in self.monomials[m]))
                terms = tuple(sorted((self.product(n, without), c) for n, c in terms))
            c = terms[0][1]
            found = self._parts[x] = c, m, self._intern(terms if c == 1 else tuple((n, small(Fraction(d) / c)) for n, d in terms))
        return found

    def _common(self, terms: Terms) -> int:
        """Atoms that are in all terms, or under all of them, to the power that is nearest to 0."""
        shared = dict(self.monomials[terms[0][0]])
        for m, _ in terms[1:]:
            if not shared:
                return _UNIT
            here = dict(self.monomials[m])
            for atom, power in list(shared.items()):
                other = here.get(atom, 0)
                if power * other <= 0:
                    del shared[atom]
                elif other * other < power * power:
                    shared[atom] = other
        return self.monomial(tuple(sorted(shared.items()))) if shared else _UNIT

    def name_of(self, x: int) -> int:
        """A name for a polynomial of several terms, times what they have in common."""
        if x == NINF or len(self.polys[x]) < 2:
            return x
        c, m, q = self._projected(x)
        return self._of({self.product(m, self.monomial(((self._atom(("sum", q)), 1),))): c})

    def same(self, x: int, y: int) -> bool:
        """Whether two formulas are equal, names written out where they have to be."""
        return x == y or (NINF not in (x, y) and self._differences.none(x, y))

    def _opened(self, x: int) -> int:
        """A polynomial without its name: what `name_of` was given."""
        terms = self.polys[x]
        if len(terms) != 1 or x == NINF:
            return x
        m, c = terms[0]
        if len(names := [a for a, p in self.monomials[m] if p == 1 and self.atoms[a][0] == "sum"]) != 1:
            return x
        rest = self._of({self.monomial(tuple((a, p) for a, p in self.monomials[m] if a != names[0])): c})
        return self._times(rest, self.atoms[names[0]][1])

    def each(self, op: Callable[[int], int], a: Array) -> Array:
        """An operation on ids, elementwise."""
        values, back = np.unique(np.asarray(a), return_inverse=True)
        return np.array([op(v) for v in values.tolist()], np.int64)[back].reshape(np.shape(a))

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes."""
        a = np.asarray(a)
        rest = tuple(k for k in range(a.ndim) if k not in axes)
        rows = a.transpose(*rest, *axes).reshape(math.prod(a.shape[k] for k in rest), -1)
        found = np.array([self._total(row) for row in rows.tolist()], np.int64)
        return found.reshape([1 if k in axes else n for k, n in enumerate(a.shape)] if keep else [a.shape[k] for k in rest])

    def _total(self, row: Iterable[int]) -> int:
        terms: dict[int, Number] = {}
        for x in row:
            if x == NINF:
                return NINF
            for m, c in self.polys[x]:
                terms[m] = terms.get(m, 0) + c
        return self._of(terms)

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products."""
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left = np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(-1, *a.shape[-2:])
        right = np.swapaxes(np.broadcast_to(b, (*batch, *b.shape[-2:])).reshape(-1, *b.shape[-2:]), -1, -2)
        found = [[[self._dot((*row, *column)) for column in y] for row in x] for x, y in zip(left.tolist(), right.tolist())]
        return np.array(found, np.int64).reshape(*batch, a.shape[-2], b.shape[-1])

    def _dot(self, both: tuple[int, ...]) -> int:
        if both in self._dots:
            return self._dots[both]
        terms: dict[int, Number] = {}
        pairs = list(zip(both[: len(both) // 2], both[len(both) // 2 :]))
        if any(NINF in pair for pair in pairs):
            return NINF
        for x, y in pairs:
            if x and y:
                self._accumulate(terms, x, y)
        return self._dots.setdefault(both, self._of(terms))

    def apply(self, name: str, *args: Array) -> Array:
        """A function: one atom for each combination of arguments, but for the laws that the module lists."""
        arrays = np.broadcast_arrays(*args)
        stacked = np.stack([np.asarray(x).reshape(-1) for x in arrays], 1)
        values, back = np.unique(stacked, axis=0, return_inverse=True)
        found = np.array([self._function(name, tuple(row)) for row in values.tolist()], np.int64)
        return found[back.reshape(-1)].reshape(arrays[0].shape) if found.size else np.zeros(arrays[0].shape, np.int64)

    def _function(self, name: str, args: tuple[int, ...]) -> int:
        x = args[0]
        if name == "exp":
            return ONE if x == ZERO else ZERO if x == NINF else self._exponential(x)
        if name == "log" and x != NINF:
            return ZERO if x == ONE else NINF if x == ZERO else self._logarithm(x)
        if name == "maximum":
            return self._greatest(args)
        if name == "sqrt" and len(self.polys[x]) == 1 and self.polys[x][0][0] == _UNIT and x != NINF and self.polys[x][0][1] > 0:
            return int(self.const(Root(Fraction(self.polys[x][0][1]), 2)))
        if (name in ("sqrt", "relu", "abs", "tanh", "sin", "erf", "sign") and x == ZERO) or (name == "sqrt" and x == ONE):
            return x
        return self._single((name, *(self.name_of(arg) for arg in args)))

    def _exponential(self, x: int) -> int:
        """exp(q + c · log s + d · largest) = exp(q) · s^c · exp(largest)^d."""
        rest: dict[int, Number] = {}
        factor, todo = ONE, [(m, c) for m, c in self.polys[x]]
        while todo:
            m, c = todo.pop()
            kind, inner = self._alone(m)
            if kind == "log" and isinstance(c, int):
                for _ in range(abs(c)):
                    factor = self._times(factor, inner if c > 0 else self._inverse(inner))
            elif kind == "largest":
                factor = self._times(factor, self._power_of_e(self._of({m: 1}), c))
            elif kind == "sum" and any(self._alone(n)[0] in ("log", "largest") for n, _ in self.polys[inner]):
                todo += [(n, small(Fraction(c) * d)) for n, d in self.polys[inner]]
            else:
                rest[m] = rest.get(m, 0) + c
        named = self.name_of(self._of(rest))
        m, c = self.polys[named][0] if named != ZERO else (0, 0)
        return factor if named == ZERO else self._times(factor, self._power_of_e(self._of({m: 1}), c))

    def _alone(self, m: int) -> tuple[str, int]:
        return alone(self.monomials[m] if m >= 0 else (), self.atoms)

    def _power_of_e(self, x: int, c: Number) -> int:
        return self._intern(((self.monomial(((self._atom(("exp", x)), c),)), 1),))

    def _logarithm(self, x: int) -> int:
        """log(exp(u)^k · s) = k · u + log s."""
        m, c = self.polys[self.name_of(x)][0]
        found, rest = ZERO, []
        for atom, power in self.monomials[m]:
            if self.atoms[atom][0] == "exp":
                found = self._plus(found, self._times(self.atoms[atom][1], self._of({_UNIT: power})))
            else:
                rest.append((atom, power))
        inner = self._of({self.monomial(tuple(rest)): c})
        return found if inner == ONE else self._plus(found, self._single(("log", inner)))

    def largest(self, a: Array, axis: int) -> Array:
        """One atom a set of ids; a set of sets is their union."""
        rows = np.moveaxis(np.asarray(a), axis, -1)
        found = np.array([self._greatest(row) for row in rows.reshape(-1, rows.shape[-1]).tolist()], np.int64)
        return found.reshape(rows.shape[:-1])

    def _greatest(self, row: Iterable[int]) -> int:
        members: set[int] = set()
        for x in row:
            terms = self.polys[x]
            inner = self.monomials[terms[0][0]] if len(terms) == 1 and terms[0][1] == 1 and x != NINF else ()
            if len(inner) == 1 and inner[0][1] == 1 and self.atoms[inner[0][0]][0] == "largest":
                members.update(self.atoms[inner[0][0]][1:])
            elif x != NINF:
                members.add(self.name_of(x))
        if len(members) < 2:
            return members.pop() if members else NINF
        return self._single(("largest", *sorted(members)))
