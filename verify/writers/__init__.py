"""Curves and incidents in the tool where a team looks at its training: one file a tool, found by import.

A writer file declares `KIND`, what stands before the colon of `KIND:TARGET`, `TARGET`, what stands after it, for help
texts, `PACKAGE`, what to install, and `open_target(target, run) -> Writer`. Its library is imported there and nowhere
else. To add a tool, write one file here and one test file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol, cast

from proctor.errors import ConfigError, UsageError
from proctor.invariants.invariant import Severity

PREFIX: Final = "proctor/"  # of the name of every curve: they may lie beside the training's own


class Writer(Protocol):
    """One open run in a tool. Methods may raise what the library raises; see `_guarded`."""

    def series(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each of these curves; steps do not go down."""

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        """Show that an incident began; `title` is one line, `text` plain text of some lines."""

    def close(self) -> None:
        """Finish the run; nothing may be written any more."""


class Kind(Protocol):
    """A writer module."""

    KIND: str
    TARGET: str
    PACKAGE: str

    def open_target(self, target: str, run: str) -> Writer: ...


class Target(NamedTuple):
    """Which tool, and where in it."""

    kind: str
    where: str


def kinds() -> dict[str, Kind]:
    """Writer modules by what users call them."""
    found = (m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    modules = (cast(Kind, importlib.import_module(f"{__name__}.{name}")) for name in found)
    return {module.KIND: module for module in modules}


def forms() -> str:
    """What targets look like, for help texts."""
    return ", ".join(f"{kind}:{module.TARGET}" for kind, module in sorted(kinds().items()))


def parse(text: str) -> Target:
    """Read `KIND:TARGET`.

    Raises:
        UsageError: no such kind, or nothing after the colon.
    """
    kind, colon, where = text.partition(":")
    if not colon or not where or kind not in kinds():
        raise UsageError(f"{text!r} names no place to write to", hint=f"use {forms()}")
    return Target(kind, where)


def open_writer(target: Target, run: str) -> Writer:
    """Begin a run in a tool; may wait for the network.

    Args:
        target: from `parse`.
        run: how the run is called there.

    Raises:
        ConfigError: the tool's package is not installed, or it refuses the target.
    """
    kind = kinds()[target.kind]
    try:
        return kind.open_target(target.where, run)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{target.kind}: {error}", hint=f"pip install {kind.PACKAGE}") from None
    except Exception as error:  # noqa: BLE001  whatever a library raises is about this target
        from proctor.verify.writers._guarded import told

        raise ConfigError(f"{target.kind}: {told(error)}", hint=f"the target is {kind.TARGET}") from None


def library(name: str) -> Any:  # modules of libraries that need not be there where types are checked
    """Import a tool's library, late.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    return importlib.import_module(name)
