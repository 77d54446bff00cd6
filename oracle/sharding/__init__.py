"""How a mesh axis cuts a dimension: one file per strategy, one function in it.

A strategy says which part of a dimension the `index`-th of `parts` ranks holds, as slices of the dimension in the
order in which the rank stores them. To add one, put a file here:

    @register("mine")
    def mine(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
        ...

The parts of all indices must cover the dimension once, else there is no whole (`merge.join`). `options` are the whole
numbers that a plan writes after the dimension, `"mine:0:3"`. A strategy that cannot be carried out for an extent raises
`ValueError` with the reason; whoever knows the tensor's name adds it. Source: TTrace §4.1, "providing a function that
maps the parallelization ranks to shard mappings".
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Literal, NamedTuple

Rule = Callable[[int, int, int, tuple[int, ...]], list[slice]]
Reduction = Literal["", "sum", "avg", "max", "min"]


class Strategy(NamedTuple):
    """A registered strategy.

    Args:
        name: as plans write it.
        cut: (extent of the dimension, parts, index, options) → slices.
        reduction: for values that are not cut but combined over the axis; "" for cuts.
    """

    name: str
    cut: Rule
    reduction: Reduction = ""


_REGISTRY: dict[str, Strategy] = {}


def register(name: str, *, reduction: Reduction = "") -> Callable[[Rule], Rule]:
    """Decorator: makes a function known under a name."""

    def add(cut: Rule) -> Rule:
        _REGISTRY[name] = Strategy(name, cut, reduction)
        return cut

    return add


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")


def registry() -> dict[str, Strategy]:
    """All strategies by name; importing the files of this folder is what registers them."""
    _load()
    return dict(sorted(_REGISTRY.items()))


def strategy(name: str) -> Strategy:
    """One strategy.

    Raises:
        ValueError: no strategy has that name.
    """
    _load()
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ValueError(f"{name!r} is no sharding strategy; there are {', '.join(sorted(_REGISTRY))}") from None
