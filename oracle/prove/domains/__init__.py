"""What a float of the program can be taken for: a double, an element of a finite field, an interned polynomial.

A domain's array holds one element a float, so moving data (views, gathers, permutations) is numpy's own. What a
domain must give is arithmetic; `meanings/` writes operators in it. One file a domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array


class Domain(Protocol):
    """Arithmetic on arrays of elements; shapes broadcast as numpy's do."""

    name: str
    dtype: Any

    def const(self, value: Fraction | Root | float) -> Any:
        """The element of a number; of -inf one that absorbs what is added to it."""
        ...

    def symbol(self, keys: Array) -> Array:
        """Elements of which nothing is known but that equal keys (64-bit) are equal. `F64` gets values by another way."""
        ...

    def ints(self, values: Array) -> Array:
        """Integers as elements."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        ...

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""
        ...

    def mul(self, a: Array, b: Array) -> Array:
        """a · b."""
        ...

    def square(self, a: Array) -> Array:
        """a²; the square of a root is what it is the root of."""
        ...

    def inv(self, a: Array) -> Array:
        """1 / a."""
        ...

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes."""
        ...

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products of the last two dimensions, batched over the others."""
        ...

    def apply(self, name: str, *args: Array) -> Array:
        """A function of which nothing is known, elementwise: equal arguments, equal results."""
        ...

    def largest(self, a: Array, axis: int) -> Array:
        """The largest along an axis: of which is used that it depends on the set alone, and is associative."""
        ...


def normal_axes(axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dimensions as numpy wants them; none or an empty list means all."""
    if axes is None or (not isinstance(axes, int) and not list(axes)):
        return tuple(range(rank))
    found = [axes] if isinstance(axes, int) else list(axes)
    return tuple(sorted(a % rank if rank else 0 for a in found)) if rank else ()
