"""What a number of a program stands for: 0.1 is one tenth, 0.3333333333333333 a third, not their binary neighbours.

A size's inverse (1/3 for three ranks) is rounded when the program makes it, and the proof is over real numbers.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_DENOMINATOR: Final = 4096
_DIGITS: Final = 12
_PRIMES: Final = 10_000


@functools.lru_cache(65536)
def rational(value: float, single: bool = False) -> Fraction:
    """The number that a float stands for: the fraction of a small denominator that rounds to it, else its shortest decimal.

    Args:
        value: finite.
        single: it was made in float32.
    """
    if value == int(value) and abs(value) < 2**53:
        return Fraction(int(value))
    near = Fraction(value).limit_denominator(_DENOMINATOR)
    if single:
        if np.float32(near.numerator / near.denominator) == np.float32(value):
            return near
        return Fraction(str(np.float32(value)))
    if abs(near.numerator / near.denominator - value) <= math.ulp(value):
        return near
    short = Fraction(f"{value:.{_DIGITS}g}")
    return short if abs(float(short) - value) <= 4 * math.ulp(value) else Fraction(repr(value))


class Root(msgspec.Struct, frozen=True):
    """A root of a fraction, of degree 2 or 4, or what is as much below 0: what programs scale attention and norms by."""

    of: Fraction
    degree: int
    negative: bool = False

    def __float__(self) -> float:
        found = math.pow(self.of, 1 / self.degree)
        return -found if self.negative else found


def product(a: Fraction | Root, b: Fraction | Root) -> Fraction | Root:
    """a · b, as the fraction or the root of least degree that it is."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    degree = max(one.degree for one in (a, b) if isinstance(one, Root))
    of, negative = Fraction(1), False
    for one in (a, b):
        of *= one.of ** (degree // one.degree) if isinstance(one, Root) else abs(one) ** degree
        negative ^= one.negative if isinstance(one, Root) else one < 0
    while degree > 1 and (root := _square_root(of)) is not None:
        of, degree = root, degree // 2
    return Root(of, degree, negative) if degree > 1 and of else -of if negative else of


def primes(root: Root) -> tuple[Fraction, dict[int, Fraction]]:
    """A root as a fraction times powers of primes between 0 and 1, so equal numbers are written in one way; a large factor that is not found is taken as a prime."""
    over, powers = Fraction(-1 if root.negative else 1), dict[int, Fraction]()
    for whole, sign in ((root.of.numerator, 1), (root.of.denominator, -1)):
        for prime, times in _factors(whole):
            times = times * sign
            over *= Fraction(prime) ** (times // root.degree)
            if times % root.degree:
                powers[prime] = Fraction(times % root.degree, root.degree)
    return over, powers


def _factors(whole: int) -> list[tuple[int, int]]:
    found, prime = [], 2
    while prime < _PRIMES and prime * prime <= whole:
        times = 0
        while whole % prime == 0:
            whole, times = whole // prime, times + 1
        found += [(prime, times)] if times else []
        prime += 1
    root, power = math.isqrt(whole), 1
    while whole > 1 and root * root == whole:
        whole, root, power = root, math.isqrt(root), 2 * power
    return [*found, (whole, power)] if whole > 1 else found


def inverse(a: Fraction | Root) -> Fraction | Root:
    """1 / a."""
    return Root(1 / a.of, a.degree, a.negative) if isinstance(a, Root) else 1 / a


def _square_root(of: Fraction) -> Fraction | None:
    over, under = math.isqrt(of.numerator), math.isqrt(of.denominator)
    return Fraction(over, under) if over * over == of.numerator and under * under == of.denominator else None


@functools.lru_cache(65536)
def real(value: float) -> Fraction | Root:
    """The number that a float of a program stands for: a small fraction, a root of one, or its decimal."""
    found = rational(value)
    if value > 0 and found.denominator > _DENOMINATOR:
        for degree in (2, 4):
            near = Fraction(value**degree).limit_denominator(_DENOMINATOR)
            if near and abs(float(near) ** (1 / degree) - value) <= 2 * math.ulp(value):
                return Root(near, degree)
    return found


_KEPT = 4096  # numbers of one array of which it is kept


def written_down(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of recorded numbers are ones that a program writes down: not finite, or of a denominator up to 64 and not large."""
    numbers = values.tobytes()
    found = _written_down(numbers) if values.size <= _KEPT else _written_down.__wrapped__(numbers)
    return np.frombuffer(found, np.bool_).reshape(values.shape)


@functools.lru_cache(4096)
def _written_down(numbers: bytes) -> bytes:
    values = np.frombuffer(numbers, np.float64)
    single = values.astype(np.float32)
    found = ~np.isfinite(values)
    with np.errstate(all="ignore"):
        for denominator in range(1, 65):
            near = np.round(values * denominator) / denominator
            found |= (near.astype(np.float32) == single) & (np.abs(values) <= 1 << 20)
    # what random numbers of float32 meet by chance: a grid of 64ths and below has 1,260 points in each unit
    return found.tobytes()
