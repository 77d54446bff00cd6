"""Plain attributes of modules that are given to a function: were they still there, and the same, when it returned?

A library that keeps notes of its own on the user's modules may overwrite the user's (DeepSpeed-6772: `id`). Looked at
until the first update is done, the first calls of each function only, so a trained step pays nothing.
"""

from __future__ import annotations

import json
from typing import Any

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Name, Value

_CALLS = 4  # of each function
_MODULES = 256  # of one argument
_ATTRIBUTES = 4096  # of one call
_LAST_STEP = 1

Attributes = dict[tuple[int, str], tuple[str, Any]]  # by module and key: path of the attribute, value


@register
class ModuleAttributes(Probe):
    """Rows of `Value.ATTRIBUTE`: how many attributes a call met, and one for each that it changed or removed."""

    name = "attributes"
    kinds = frozenset({Value.ATTRIBUTE})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._over = False
        self._calls: dict[str, int] = {}
        self._open: list[tuple[int, list[Any], Attributes]] = []  # call, modules, attributes before it

    def hooks(self, function: str, home: Home) -> Hooks:
        if home is Home.TORCH:
            return NO_HOOKS

        method = function.rpartition(".")[2]

        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            if self._over or self._calls.get(function, 0) >= _CALLS:
                return
            given = _modules(method, args, kwargs)
            if given:
                self._calls[function] = self._calls.get(function, 0) + 1
                self._open.append((self.sink.call, given, _attributes(given)))

        def after(args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
            while self._open and self._open[-1][0] > self.sink.call:
                self._open.pop()  # left by an exception
            if self._open and self._open[-1][0] == self.sink.call:
                _, given, earlier = self._open.pop()
                if earlier and not raised:
                    self._compare(earlier, _attributes(given))

        return before, after

    def _compare(self, earlier: Attributes, now: Attributes) -> None:
        self.sink.number("", len(earlier), kind=Value.ATTRIBUTE)
        for key, (path, old) in earlier.items():
            new = now.get(key, (path, None))[1]
            if type(new) is not type(old) or new != old:
                facts = json.dumps({"old": str(old)[:64], "new": str(new)[:64]}, sort_keys=True)
                meta = self.sink.recorder.intern(int(Name.META), facts)
                self.sink.note(Value.ATTRIBUTE, path, meta=meta)

    def step_begins(self, step: int) -> None:
        if step > _LAST_STEP:
            self._over = True
            self._open.clear()


def _modules(method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    """Modules among the arguments, but not one whose own method is called: that may do with itself as it likes."""
    from torch.nn import Module

    own = args[:1] if args and hasattr(type(args[0]), method) else ()
    values = [*args[len(own) :], *(kwargs or {}).values()]
    values += [item for value in values if type(value) in (list, tuple) for item in value[:_MODULES]]
    return [value for value in values if issubclass(type(value), Module)]


def _attributes(given: list[Any]) -> Attributes:
    found: Attributes = {}
    for root in given:
        for i, (path, module) in enumerate(plainly.named_modules(root)):
            if i >= _MODULES or len(found) >= _ATTRIBUTES:
                break
            for key, value in vars(module).items():
                if type(value) in (int, str) and not key.startswith("_"):
                    found[(id(module), key)] = (".".join(filter(None, (path, key))), value)
    return found
