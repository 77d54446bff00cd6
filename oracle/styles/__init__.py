"""Styles: usual ways to cut a kind of layer, as rules of a plan. One style = one file with one function, which registers itself.

    @register("mine")
    def mine(plan, module, axis, **options): plan.shard(rf"{module}\\.weight", **{axis: 0})

A plan holds what a style makes, not its name: what is written to a file is complete without this folder.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from proctor.errors import OracleError

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan

Style = Callable[..., None]

_REGISTRY: dict[str, Style] = {}


def register(name: str) -> Callable[[Style], Style]:
    """Decorator: makes a style known under a name."""

    def add(style: Style) -> Style:
        _REGISTRY[name] = style
        return style

    return add


@functools.cache
def registry() -> dict[str, Style]:
    """All styles by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def apply(plan: Plan, name: str, module: str, axis: str, options: Mapping[str, Any]) -> None:
    """Add the rules of a style to a plan.

    Raises:
        OracleError: there is no such style, or it takes no such option.
    """
    styles = registry()
    if name not in styles:
        raise OracleError(f"{name[:40]!r} is no style", hint=f"there are {', '.join(styles)}")
    allowed = list(inspect.signature(styles[name]).parameters)[3:]
    if odd := sorted(set(options) - set(allowed)):
        raise OracleError(f"style {name!r} takes no {odd[0][:40]!r}", hint=f"allowed: {', '.join(allowed) or 'nothing'}")
    styles[name](plan, module, axis, **options)
