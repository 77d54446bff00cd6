"""What an operator is, and the list of all of them. A file in `operators/` registers its own; nothing else changes.

This file is also loaded inside of the programs (`start/sitecustomize.py`), so it imports the standard library only.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal


@dataclass(frozen=True)
class Plant:
    """One place where an operator can plant its bug: what is there, and the change of the tree that does it."""

    line: int
    function: str  # the function of the program around it; "" at the top of the file
    words: tuple[str, ...]  # what is changed: names that a report may call it by
    apply: Callable[[], None]


Sites = Callable[[ast.Module], Iterator[Plant]]
# Gets torch and `fired`, which is to be called whenever the bug acts, and wraps what it wants to break.
Planter = Callable[[Any, Callable[[], None]], None]


@dataclass(frozen=True)
class Operator:
    """One kind of silent bug.

    Args:
        name: unique, in snake case.
        sentence: what goes wrong, for the table's reader.
        kind: "syntax" changes the program's source, "process" wraps torch inside of it.
        words: names that a report may call the bug by, besides those of the place.
        sites: where it applies in a module's tree (syntax).
        mentions: it can apply to a program whose source has one of these (process).
        plant: wraps what it breaks (process).
        ranks: least number of ranks that it needs.
    """

    name: str
    sentence: str
    kind: Literal["syntax", "process"]
    words: tuple[str, ...]
    sites: Sites | None = None
    mentions: tuple[str, ...] = ()
    plant: Planter | None = None
    ranks: int = 1

    def applies(self, source: str, ranks: int = 1) -> bool:
        """Whether the bug can be planted into a program with this source on so many ranks."""
        if ranks < self.ranks:
            return False
        if self.sites is not None:
            return next(self.sites(ast.parse(source)), None) is not None
        return any(text in source for text in self.mentions)


OPERATORS: dict[str, Operator] = {}


def syntax(name: str, sentence: str, *words: str) -> Callable[[Sites], Sites]:
    """Register an operator on syntax trees; the function finds its places."""

    def add(sites: Sites) -> Sites:
        _add(Operator(name, sentence, "syntax", words, sites=sites))
        return sites

    return add


def process(
    name: str, sentence: str, *words: str, mentions: tuple[str, ...], ranks: int = 1
) -> Callable[[Planter], Planter]:
    """Register an operator that wraps torch; the function plants it."""

    def add(plant: Planter) -> Planter:
        _add(Operator(name, sentence, "process", words, mentions=mentions, plant=plant, ranks=ranks))
        return plant

    return add


def _add(operator: Operator) -> None:
    if operator.name in OPERATORS:
        raise ValueError(f"two operators are called {operator.name}")
    OPERATORS[operator.name] = operator


def load(*kinds: str) -> dict[str, Operator]:
    """Import every file of `operators/` (or of these kinds only) and give all operators by name."""
    package = __package__ or ""
    for kind in kinds or ("syntax", "process"):
        folder: ModuleType = importlib.import_module(f"{package}.operators.{kind}")
        for found in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{found.name}")
    return dict(sorted(OPERATORS.items()))
