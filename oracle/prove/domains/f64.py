"""Doubles: the program's own numbers, in double precision. It knows exp, log and order, and it rounds."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import numpy as np

from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.tape import Array

_erf = np.vectorize(__import__("math").erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sigmoid": _sigmoid, "tanh": np.tanh, "erf": _erf, "sin": np.sin, "cos": np.cos,
    "abs": np.abs, "sign": np.sign, "relu": lambda x: np.maximum(x, 0), "pow": lambda x, y: np.power(x, y), "floor": np.floor,
    "minimum": np.minimum, "maximum": np.maximum, "log1p": np.log1p, "expm1": np.expm1, "step": lambda x: (x > 0).astype(np.float64),
    "log2": np.log2, "exp2": np.exp2, "round": np.round, "ceil": np.ceil, "atan": np.arctan, "softplus": lambda x: np.logaddexp(0, x),
}


class F64:
    """See the module."""

    name = "f64"
    dtype = np.float64

    def const(self, value: Fraction | Root | float) -> Any:
        """The number."""
        return np.float64(float(value))

    def symbol(self, keys: Array) -> Array:
        """Numbers between -1 and 1 that the keys give."""
        mixed = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
        found: Array = mixed.astype(np.float64) / 2.0**52 - 1.0
        return found

    def ints(self, values: Array) -> Array:
        """The numbers."""
        return values.astype(np.float64)

    def add(self, a: Array, b: Array) -> Array:
        """a + b."""
        return a + b

    def sub(self, a: Array, b: Array) -> Array:
        """a - b."""
        return a - b

    def mul(self, a: Array, b: Array) -> Array:
        """a · b."""
        return a * b

    def square(self, a: Array) -> Array:
        """a²."""
        return a * a

    def inv(self, a: Array) -> Array:
        """1 / a."""
        return 1.0 / a

    def sum(self, a: Array, axes: tuple[int, ...], keep: bool = False) -> Array:
        """Sum over axes."""
        return np.asarray(a.sum(axis=axes, keepdims=keep))

    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix products."""
        return a @ b

    def dot(self, a: Array, b: Array, axis: int) -> Array:
        """Sum of products."""
        found = a.take(0, axis) * b.take(0, axis)
        for k in range(1, a.shape[axis]):
            found = found + a.take(k, axis) * b.take(k, axis)
        return np.asarray(found)

    def apply(self, name: str, *args: Array) -> Array:
        """The function itself."""
        base = name.partition(":")[0]
        if base not in _FUNCTIONS:
            raise NotImplementedError(name)
        return np.asarray(_FUNCTIONS[base](*args))

    def largest(self, a: Array, axis: int) -> Array:
        """The largest."""
        return np.asarray(a.max(axis=axis))
