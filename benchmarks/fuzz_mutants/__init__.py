"""Bugs that are planted into torch within a rank, for `fuzz_selftest.py`: each with its trigger set and where it shows first.

A mutant is a function that patches the library before a rank's first task. `mutant(*axes, kind=…, module=…)` says which axes must be in the minimal setting, what kind of
tensor is wrong first, and, where the bug sits in one kind of layer, the class of that layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Mutant(NamedTuple):
    """A planted bug: the patch, the trigger set, kind of the first tensor that differs, class of its module ("" for any)."""

    plant: Callable[[], None]
    axes: frozenset[str]
    kind: str
    module: str


MUTANTS: dict[str, Mutant] = {}


def mutant(*axes: str, kind: str = "gradient", module: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a mutant."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[function.__name__] = Mutant(function, frozenset(axes), kind, module)
        return function

    return add


from benchmarks.fuzz_mutants import replicas, shards, updates  # noqa: E402, F401  each registers its own
