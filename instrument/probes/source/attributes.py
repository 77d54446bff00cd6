"""Formulas of an object's attributes, from the methods of its class: `self.total = steps * epochs` in a constructor."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from proctor.instrument.probes.source import formulas
from proctor.instrument.probes.source.assignments import MAX_ALTERNATIVES
from proctor.instrument.probes.source.parsing import dotted, function_tree, pairs, written, written_by

_MAX_METHODS = 64


def formulas_of(cls: type, receiver: Any, follows: Callable[[Any], bool]) -> dict[str, list[formulas.Formula]]:
    """Formulas of `self.…`, by name: of attributes that one method assigns, from what never changes elsewhere.

    Args:
        cls: class of the object.
        receiver: the object; its methods may be followed.
        follows: whether a function's source may be read.
    """
    assigned: dict[str, list[tuple[str, formulas.Formula | None]]] = {}
    left = [formulas.MAX_WORK]
    methods = 0
    for method, function in _methods(cls, follows):
        methods += 1
        if methods > _MAX_METHODS:
            break
        tree = function_tree(function.__code__)
        if tree is not None and tree.args.args:
            for name, formula in _assigned(tree, function, receiver, follows, left):
                assigned.setdefault(name, []).append((method, formula))
    found: dict[str, list[formulas.Formula]] = {}
    if left[0] < 0 or methods > _MAX_METHODS:
        return {}  # what was not read may change any of them
    for name, several in assigned.items():
        made = [f for _, f in several if f is not None]
        homes = {method for method, _ in several}
        if len(made) < len(several) or len(homes) > 1 or len(made) > MAX_ALTERNATIVES:
            continue
        names = {n for f in made for n in formulas.operands(f)}
        elsewhere = {n for n, others in assigned.items() if {m for m, _ in others} - homes}
        if names and name not in names and not any(p in elsewhere for n in names for p in formulas.prefixes(n)):
            found[name] = made
    return found


def _methods(cls: type, follows: Callable[[Any], bool]) -> Iterator[tuple[str, types.FunctionType]]:
    for owner in cls.__mro__:
        for value in list(vars(owner).values()):
            function = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else None
            if isinstance(function, types.FunctionType) and follows(function):
                yield f"{owner.__qualname__}.{function.__name__}", function


def _assigned(
    tree: ast.FunctionDef, function: types.FunctionType, receiver: Any, follows: Callable[[Any], bool], left: list[int]
) -> Iterator[tuple[str, formulas.Formula | None]]:
    """What one method assigns to attributes; `None` for what is not a formula of attributes."""
    me = tree.args.args[0].arg
    outer = function.__globals__

    def resolve(path: str) -> Any:
        head, *rest = path.split(".")
        return formulas.walk(receiver if head == "self" else outer.get(head), rest)

    every = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    meaning: dict[str, formulas.Formula | None] = {p.arg: None for p in every}
    meaning[me] = "self"
    meaning.update({alias: path for alias, path in _aliases(tree, me) if alias in meaning})
    meaning.update({n: float(v) for n, v in outer.items() if isinstance(v, int | float) and n in function.__code__.co_names})
    reader = formulas.Reader(resolve, follows, meaning, left=left)
    yield from _walk(tree.body, reader, me, straight=True)


def _aliases(tree: ast.FunctionDef, me: str) -> Iterator[tuple[str, str]]:
    """Parameters that are kept as they are: `self.accum = accum`."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for target, value in pairs(statement):
                name = dotted(target)
                if isinstance(value, ast.Name) and name.startswith(f"{me}.") and name.count(".") == 1:
                    yield value.id, f"self.{name.partition('.')[2]}"


def _walk(
    body: list[ast.stmt], reader: formulas.Reader, me: str, straight: bool
) -> Iterator[tuple[str, formulas.Formula | None]]:
    before: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            before.update(written(statement))
            for target, value in pairs(statement):
                name = dotted(target)
                kept = f"self.{name.partition('.')[2]}" if name.startswith(f"{me}.") else ""
                formula = reader.formula(value) if straight and not isinstance(statement, ast.AugAssign) else None
                if kept:
                    # `self.accum = accum` says nothing of its own.
                    yield kept, formula if formula != kept else 0
                elif name:
                    reader.meaning[name] = formula
                else:
                    reader.meaning.update(dict.fromkeys(written(target), None))
                    yield from ((f"self.{n.partition('.')[2]}", None) for n in written(target) if n.startswith(f"{me}."))
        elif isinstance(statement, ast.If):
            # What a branch sets is one of several possibilities; a local variable of it is no longer known.
            sides = [{n for s in part for n in written(s)} for part in (statement.body, statement.orelse)]
            for name in (sides[0] ^ sides[1]) - before:
                if name.startswith(f"{me}."):
                    yield f"self.{name.partition('.')[2]}", None  # or it keeps what it had
            for part in (statement.body, statement.orelse):
                yield from _walk(part, reader, me, straight)
                reader.meaning.update({n: None for s in part for n in written(s) if "." not in n})
        else:
            inside = [n for s in ast.walk(statement) if s is not statement for n in written_by(s)]
            inside += written(statement)
            reader.meaning.update({n: None for n in inside if "." not in n})
            yield from ((f"self.{n.partition('.')[2]}", None) for n in inside if n.startswith(f"{me}."))
