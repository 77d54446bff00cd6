"""Whether two polynomials are the same once names are written out: only those that have to be, the newest first.

A name is newer than all that it stands for. Seen as an unknown, the newest one splits a difference into coefficients; if all are 0
the difference is, without a look into the name. Else the name is written out. Fractions are multiplied through: what is under
one is not 0, as everywhere in `poly.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proctor.oracle.prove.domains.poly import Number, Poly

_STEPS: Final = 400  # polynomials that are looked at for one difference
_LONG: Final = 800  # terms that they may have
Sum = dict[int, "Number"]  # monomial → coefficient


class Differences:
    """Answers are remembered."""

    def __init__(self, poly: Poly) -> None:
        self._p = poly
        self._known: dict[tuple[int, int], bool] = {}
        self._left = 0

    def none(self, x: int, y: int) -> bool:
        """Whether two polynomials are the same."""
        key = (min(x, y), max(x, y))
        if key not in self._known:
            self._left = _STEPS
            found: Sum = dict(self._p.polys[x])
            for m, c in self._p.polys[y]:
                found[m] = found.get(m, 0) - c
            self._known[key] = self._vanishes(_whole(found))
        return self._known[key]

    def _vanishes(self, terms: Sum) -> bool:
        folded = self._p.folded(terms)
        terms = {m: c for m, c in (terms if folded is terms else _whole(folded)).items() if c}
        if not terms:
            return True
        self._left -= 1
        if self._left % 8 == 0 or len(terms) > _LONG // 8:
            self._p.look_at_the_time()
        if len(terms) == 1 or self._left < 0 or len(terms) > _LONG:
            return False
        powers = {a: p for m in terms for a, p in self._p.monomials[m] if self._p.atoms[a][0] == "sum"}
        if not powers:
            return False
        parts = self._by_fraction(terms)
        if len(parts) > 1 and all(self._vanishes(part) for part in sorted(parts, key=len)):
            return True
        newest = max(powers)
        by_power: dict[int, Sum] = defaultdict(dict)
        for m, c in terms.items():
            factors = self._p.monomials[m]
            power = next((int(p) for a, p in factors if a == newest), 0)
            by_power[power][self._p.monomial(tuple(f for f in factors if f[0] != newest)) if power else m] = c
        if len(by_power) == 1:
            return self._vanishes(next(iter(by_power.values())))
        if all(self._vanishes(part) for part in sorted(by_power.values(), key=len)):
            return True
        return self._vanishes(self._written_out(by_power, newest))

    def _by_fraction(self, terms: Sum) -> list[Sum]:
        """Terms with the same atoms under their fractions: such as those of one row of a softmax."""
        found: dict[tuple[int, ...], Sum] = defaultdict(dict)
        for m, c in terms.items():
            found[tuple(a for a, p in self._p.monomials[m] if p < 0)][m] = c
        return list(found.values())

    def _written_out(self, by_power: dict[int, Sum], name: int) -> Sum:
        """The sum, times a number that makes all of its coefficients whole."""
        lowest, highest = min(by_power), max(by_power)
        written = self._p.polys[self._p.atoms[name][1]]
        under = _under(c for _, c in written)
        inner = [(m, int(c * under)) for m, c in written]
        product = self._p.product
        found: Sum = {}
        power: Sum = {0: 1}
        for k in range(lowest, highest + 1):
            times = under ** (highest - k)
            for m, c in by_power.get(k, {}).items():
                c *= times
                for n, e in power.items():
                    p = product(m, n)
                    found[p] = found.get(p, 0) + c * e
            if k < highest:
                grown: Sum = {}
                for n, e in power.items():
                    for m, c in inner:
                        p = product(n, m)
                        grown[p] = grown.get(p, 0) + c * e
                power = grown
            if len(found) > _LONG or len(power) > _LONG:
                self._left = 0
                break
        return found


def _under(numbers: Iterable[Number]) -> int:
    """What makes numbers whole."""
    return math.lcm(*{c.denominator for c in numbers})


def _whole(terms: Sum) -> Sum:
    """The same but for a factor, of whole numbers, which are added and multiplied many times as fast as fractions."""
    under = _under(terms.values())
    return {m: int(c * under) for m, c in terms.items()}
