"""Frameworks that know how their models are cut: one file each, found by listing this folder.

A file has `present()`, `is_model(root)`, `canonical_names(root)`, `left_out(root)` and `plan_of(roots)`, as
`megatron.py` and its activations have them. Nothing is imported that the program has not imported itself.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from proctor.oracle.plans.plan import Plan


class Framework(Protocol):
    """What a file of this folder offers."""

    def present(self) -> bool:
        """Whether the program uses it."""

    def is_model(self, root: Any) -> bool:
        """Whether a module is one of its models."""

    def canonical_names(self, root: Any) -> Mapping[str, str]:
        """Names in the whole model, by path below a stage."""

    def left_out(self, root: Any) -> Mapping[str, frozenset[str]]:
        """Sides (`input`, `output`) of modules that are none in the whole model."""

    def plan_of(self, roots: Iterable[Any]) -> Plan:
        """How parameters and activations are cut."""


def framework_of(root: Any) -> Framework | None:
    """The framework that a model belongs to."""
    return next((f for f in _frameworks() if f.present() and f.is_model(root)), None)


@functools.cache
def _frameworks() -> tuple[Framework, ...]:
    found = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return tuple(cast(Framework, module) for module in found if hasattr(module, "plan_of"))
