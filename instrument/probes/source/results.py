"""Numbers that the user's functions return, with the formula of the return statement."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from proctor.instrument.probes.source import formulas, reading
from proctor.instrument.probes.source.parsing import function_tree

WHOLE_CALLS, CALL_LOOKS = 8, 32
FACTS = ("loss()", "world_size()", "rank()")  # numbers that need no variable


class Notes(Protocol):
    """Where results go; `numbers.Numbers`."""

    results: dict[str, float | None]

    def value(self, name: str, scope: Mapping[str, Any], outer: Mapping[str, Any]) -> float | None: ...
    def following(self, module: str) -> Callable[[Any], bool]: ...
    def put(self, function: str, name: str, value: float, made: list[formulas.Formula] | None, through: str = "") -> None: ...


class Results:
    """The after-hook of one of the user's functions: its numbers, and the formula of its result."""

    def __init__(self, notes: Notes, function: str) -> None:
        self._notes, self._name = notes, function
        self._calls = 0
        self._globals: dict[str, Any] = {}
        self._source: tuple[tuple[str, ...], list[formulas.Formula], str] | None = None  # parameters, formulas, through

    def returned(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        value = None if raised else reading.number(result)
        self._notes.results[self._name] = value
        if value is None or self._calls >= CALL_LOOKS:
            return
        self._calls += 1
        if self._source is None:
            self._source = self._read(args)
        parameters, made, through = self._source
        scope = {**dict(zip(parameters, args)), **(kwargs or {})}
        if self._calls <= WHOLE_CALLS:
            found = reading.numbers(scope)
        elif made:
            found = reading.numbers(scope, depth=0)
        else:
            return
        for name in sorted({*FACTS, *(n for f in made for n in formulas.operands(f))}):
            if name not in found and (number := self._notes.value(name, scope, self._globals)) is not None:
                found[name] = number
        for name, number in found.items():
            self._notes.put(self._name, name, number, None)
        self._notes.put(self._name, "return", value, made or None, through)

    def _read(self, args: tuple[Any, ...]) -> tuple[tuple[str, ...], list[formulas.Formula], str]:
        function = function_named(self._name)
        if function is None:
            return (), [], ""
        self._globals = function.__globals__
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        tree = function_tree(function.__code__)
        if tree is None:
            return names, [], ""
        every = [*names, *function.__code__.co_varnames[len(names) : len(names) + function.__code__.co_kwonlyargcount]]
        scope = dict(zip(names, args))
        resolve = resolver(scope, function.__globals__)
        reader = formulas.Reader(resolve, self._notes.following(str(function.__module__)), {n: n for n in every})
        found = reader.returned(tree.body)
        through = ",".join(sorted(reader.through))
        return names, [found] if found is not None and formulas.operands(found) else [], through


def function_named(name: str) -> types.FunctionType | None:
    """The function of a canonical name of the user's code."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is None:
            continue
        thing: Any = module
        for part in parts[end:]:
            thing = inspect.getattr_static(thing, part, None)
            thing = thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing
        thing = inspect.unwrap(thing) if callable(thing) else None
        return thing if isinstance(thing, types.FunctionType) else None
    return None


def resolver(scope: Mapping[str, Any], outer: Mapping[str, Any]) -> Callable[[str], Any]:
    def resolve(path: str) -> Any:
        head, *rest = path.split(".")
        return formulas.walk(scope.get(head, outer.get(head, getattr(builtins, head, None))), rest)

    return resolve
