"""Relations of a whole program, which runs again otherwise: one file each; each registers itself."""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from proctor.oracle.selfcheck import Relation
from proctor.oracle.selfcheck.launch import Launched
from proctor.oracle.selfcheck.outcomes import Outcome


@dataclass(frozen=True)
class Program:
    """What is checked.

    Attributes:
        command: the user's.
        out: folder of the check.
        first: what the first run left.
        timeout_s: of each run.
        vary: the user's own pairs of arguments.
        step: update at which relations are checked.
    """

    command: Sequence[str]
    out: Path
    first: Launched
    timeout_s: float
    vary: Sequence[tuple[str, str]] = ()
    step: int = 2


class ProgramRelation(Relation):
    """Of a whole program."""

    @abstractmethod
    def check(self, program: Program) -> list[Outcome]:
        """Judge it; raises as `ModelRelation.check`."""


Kind = TypeVar("Kind", bound=type[ProgramRelation])
_REGISTRY: dict[str, ProgramRelation] = {}


def register(kind: Kind) -> Kind:
    """Make a relation known."""
    _REGISTRY[kind.name] = kind()
    return kind


def registry() -> dict[str, ProgramRelation]:
    """All relations of programs, by name."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    return dict(sorted(_REGISTRY.items()))
