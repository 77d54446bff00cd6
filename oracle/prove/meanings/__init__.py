"""What operators mean, written in a domain's arithmetic: one file a family, each registers itself.

A meaning gets the arguments of the operator: floats as `Floats`, integers as numpy arrays, numbers as they are. It returns
the domain's arrays in the order of the results. In-place and `out` forms, and `_foreach_` forms over lists, need none of their own.
An operator without a meaning is opaque: it is listed, and nothing that depends on it is proved.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final, TypeVar

import numpy as np

from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.numbers import Root, real
from proctor.oracle.prove.tape import COMPLEX, Array

Meaning = Callable[..., Any]  # Any: an array, or a tuple of them
F = TypeVar("F", bound=Meaning)
_MEANINGS: Final[dict[str, Meaning]] = {}
_LOWEST: Final = -1e30  # what a program adds so that softmax gives 0, such as the smallest float


class Floats:
    """A float argument: the domain's array `a`."""

    __slots__ = ("a",)

    def __init__(self, a: Array) -> None:
        self.a = a


class Pairs:
    """A complex argument: real and imaginary parts along the last dimension of `a`."""

    __slots__ = ("a",)

    def __init__(self, a: Array) -> None:
        self.a = a


class Context:
    """What a meaning needs: the domain `d`, the shapes of the results, their recorded integers, and who looks at what is in between."""

    def __init__(self, domain: Domain) -> None:
        self.d = domain
        self.sizes: list[tuple[int, ...]] = []
        self.recorded: list[Array | None] = []
        self.inner: Callable[[Array], None] | None = None

    def cut(self, found: Array) -> Array:
        """A result in between, of which another program may make an operation of its own: it is looked at like a node's."""
        if self.inner is None:
            return found
        found = np.array(found)
        self.inner(found)
        return found

    def f(self, value: Any) -> Array:
        """An argument as the domain's array."""
        if isinstance(value, Floats):
            return value.a
        if isinstance(value, np.ndarray):
            return self.d.ints(value)
        return np.asarray(self.d.const(number(value)))

    def const(self, value: Fraction | Root | float | int) -> Any:
        """A constant."""
        return self.d.const(number(value))


def number(value: Any) -> Fraction | Root | float:
    """What a Python number stands for."""
    if isinstance(value, Fraction | Root):
        return value
    if isinstance(value, bool | int):
        return Fraction(int(value))
    if value != value or value in (float("inf"), float("-inf")):
        return float(value)
    return float("-inf") if value < _LOWEST else real(float(value))


def meaning(*names: str) -> Callable[[F], F]:
    """Register what operators mean, by their names without namespace and overload."""

    def register(function: F) -> F:
        for name in names:
            _MEANINGS[name] = function
        base_of.cache_clear()
        return function

    return register


@functools.cache
def base_of(op: str) -> tuple[str, bool]:
    """ "aten._foreach_add_.List" → ("add", True): the name that a meaning is registered by, and whether it goes over lists."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else op
    if op.startswith(COMPLEX):
        return COMPLEX + (name[:-1] if name.endswith("_") else name), False
    many = name.startswith("_foreach_")
    if many:
        name = name[len("_foreach_") :]
    if name not in _MEANINGS and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name, many


def find(op: str) -> Meaning | None:
    """What an operator means."""
    return _MEANINGS.get(base_of(op)[0])


def known(op: str) -> bool:
    """Whether an operator has a meaning."""
    return find(op) is not None


def over_lists(cx: Context, means: Meaning, args: list[Any], named: dict[str, Any], count: int) -> list[Array | None]:
    """A `_foreach_` form: the meaning once for each entry of its lists."""
    found: list[Array | None] = []
    sizes = cx.sizes
    for k in range(count):
        cx.sizes = [sizes[k]]
        one = [a[k] if isinstance(a, list) else a for a in args]
        result = means(cx, *one, **{n: (v[k] if isinstance(v, list) else v) for n, v in named.items()})
        found.append(result[0] if isinstance(result, tuple) else result)
    return found


for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
