"""Versions of the packages that a process has imported, so that two runs can be compared by them."""

from __future__ import annotations

import sys
from typing import Final

_MOST: Final = 300  # packages,
_LENGTH: Final = 80  # and characters of a version


_last: tuple[int, dict[str, str]] = (-1, {})  # number of modules, and what was read from them


def packages() -> dict[str, str]:
    """Version by package, of those that say one. What a package computes when it is asked is not asked for."""
    global _last
    number = len(sys.modules)
    if number == _last[0]:
        return _last[1]
    found: dict[str, str] = {}
    for name, module in sys.modules.copy().items():  # `list` can be interrupted by a collection, in which a module is imported
        version = None if "." in name or module is None else getattr(module, "__dict__", {}).get("__version__")
        if isinstance(version, str) and not name.startswith("_") and len(found) < _MOST:
            found[name] = version[:_LENGTH]
    _last = number, found
    return found
