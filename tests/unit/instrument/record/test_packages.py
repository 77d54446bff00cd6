"""Versions of what was imported."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from proctor.instrument.record import packages as module


def test_a_module_that_is_imported_meanwhile_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may run code of the program's in the midst of any loop, and that may import."""
    monkeypatch.setattr(module, "_last", (-1, {}))
    made: list[str] = []

    def imports(phase: str, _: object) -> None:
        name = f"made_by_a_collection_{len(made)}"
        made.append(name)
        sys.modules[name] = types.ModuleType(name)

    before = gc.get_threshold()
    gc.callbacks.append(imports)
    gc.set_threshold(1)
    try:
        found = module.packages()
    finally:
        gc.callbacks.remove(imports)
        gc.set_threshold(*before)
        for name in made:
            del sys.modules[name]
    assert found["pytest"] == pytest.__version__
