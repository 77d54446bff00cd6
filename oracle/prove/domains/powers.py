"""Powers of atoms: roots of numbers are powers of primes, and a whole power of one is a number (√2 · √2 is 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proctor.oracle.prove.domains.poly import Factors, Number

Whole = dict[int, tuple[int, "Number"]]  # monomial → the monomial without whole powers of primes, and their product
_Atoms = Sequence[tuple[Any, ...]]


def whole_part(factors: Factors, atoms: _Atoms) -> tuple[Factors, Number] | None:
    """Powers of atoms without whole powers of primes, and what these are; None where there are none."""
    whole = {a: math.floor(p) for a, p in factors if atoms[a][0] == "prime" and not 0 <= p < 1}
    if not whole:
        return None
    number = math.prod((Fraction(atoms[a][1]) ** n for a, n in whole.items()), start=Fraction(1))
    return tuple((a, p - whole.get(a, 0)) for a, p in factors if p != whole.get(a, 0)), small(number)


def folded(terms: Mapping[int, Number], whole: Whole) -> dict[int, Number]:
    """Terms in which no power of a prime is whole."""
    found: dict[int, Number] = {}
    for m, c in terms.items():
        n, d = whole.get(m, (m, 1))
        found[n] = found.get(n, 0) + c * d
    return found


def alone(factors: Factors, atoms: _Atoms) -> tuple[str, int]:
    """(kind, first argument) of a product that is one atom."""
    if len(factors) == 1 and factors[0][1] == 1:
        atom = atoms[factors[0][0]]
        return atom[0], atom[1] if len(atom) > 1 and isinstance(atom[1], int) else 0
    return "", 0


def small(value: Fraction) -> Number:
    """A whole number as an int."""
    return int(value) if value.denominator == 1 else value
