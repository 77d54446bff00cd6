"""A program as its own reference: it must compute the same under changes that must not matter (metamorphic relations).

    command ──▶ watch (in the process) ──▶ copy of a step ──▶ relations/  one file a relation: models/, updates/
       └──────▶ run again, otherwise  ──────────────────────▶ program/    one file a relation of the whole program
                                                    └──▶ outcomes ──▶ report

`proctor oracle self -- CMD` starts the command with `watch` in it. At its third update the process is forked, once a relation: the
fork is the copy of the step, and the job itself goes on untouched. Source of the idea: D3's distributed equivalence rule.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.outcomes import Outcome
    from proctor.oracle.selfcheck.watching.step import Call, Update


class NotApplicable(Exception):
    """The relation says nothing about this program; the text says why."""


class Unknown(Exception):
    """The relation applies, and could not be checked; the text says why."""


class Relation(ABC):
    """A change that must not matter, or one that must.

    Attributes:
        name: what reports and `--only` call it.
        claim: one English sentence.
        timeout_s: of a check, in a copy of the process.
        safe: also where no copy of the process can be made (CUDA): its changes to the process can be taken back.
    """

    name: ClassVar[str]
    claim: ClassVar[str]
    timeout_s: ClassVar[float] = 300.0
    safe: ClassVar[bool] = True


class ModelRelation(Relation):
    """Of one model at one real call."""

    @abstractmethod
    def check(self, call: Call) -> Outcome:
        """Judge it, in a copy of the step.

        Args:
            call: of a root module, with its real batch.

        Raises:
            NotApplicable, Unknown: nothing can be said, and why.
        """


class UpdateRelation(Relation):
    """Of one update: what led to it, and the optimizer that makes it."""

    @abstractmethod
    def check(self, update: Update) -> Outcome:
        """Judge it, in a copy of the step, before the optimizer has stepped. Raises as `ModelRelation.check`."""


Kind = TypeVar("Kind", bound=type[Relation])
_REGISTRY: dict[str, Relation] = {}


def register(kind: Kind) -> Kind:
    """Make a relation known; for the class statement of a file below `relations/`."""
    _REGISTRY[kind.name] = kind()
    return kind


def registry() -> dict[str, Relation]:
    """All relations of models and updates, by name; every module below `relations/` is imported."""
    from proctor.oracle.selfcheck import relations

    for found in pkgutil.walk_packages(relations.__path__, f"{relations.__name__}."):
        importlib.import_module(found.name)
    return dict(sorted(_REGISTRY.items()))
