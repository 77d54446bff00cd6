"""Looking at the syntax tree of a training program, and changing it: what several operators need."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .registry import Plant

Statement = ast.stmt


@dataclass(frozen=True)
class Spot:
    """A statement, the list that it stands in, and the function around it."""

    statement: Statement
    body: list[Statement]
    function: str
    loops: int  # loops around it within its function

    @property
    def position(self) -> int:
        return next(i for i, other in enumerate(self.body) if other is self.statement)


def spots(tree: ast.AST, function: str = "", loops: int = 0) -> Iterator[Spot]:
    """Every statement of a tree, outermost first."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(tree, name, None)
        if not isinstance(body, list):
            continue
        for statement in body:
            yield Spot(statement, body, function, loops)
            inside = statement.name if isinstance(statement, ast.FunctionDef | ast.ClassDef) else ""
            deeper = 0 if inside else loops + isinstance(statement, ast.For | ast.While)
            yield from spots(statement, ".".join(filter(None, (function, inside))), deeper)
    for handler in getattr(tree, "handlers", []):
        yield from spots(handler, function, loops)


def words(node: ast.AST) -> tuple[str, ...]:
    """The names in a piece of code, as a report may say them."""
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return tuple(dict.fromkeys(name for name in names if len(name) > 2 and name not in ("self", "torch", "args")))


def method(node: ast.AST) -> tuple[str, str] | None:
    """`("opt", "step")` for the call `opt.step(...)`; the receiver as it is written."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value), node.func.attr
    return None


def called(spot: Spot) -> tuple[str, str] | None:
    """`("opt", "step")` for a statement that is a method's call and no more."""
    statement = spot.statement
    return method(statement.value) if isinstance(statement, ast.Expr) else None


def statements(tree: ast.Module, *names: str, receiver: str = "", without: str = "") -> Iterator[tuple[Spot, str]]:
    """Statements that call one of these methods, with the receiver; its name contains one of `receiver`'s words."""
    for spot in spots(tree):
        found = called(spot)
        if found is None or found[1] not in names:
            continue
        name = found[0].lower()
        wanted = not receiver or any(part in name for part in receiver.split())
        if wanted and not any(part in name for part in without.split()):
            yield spot, found[0]


def plant(spot: Spot, apply: Callable[[], None], node: ast.AST | None = None) -> Plant:
    """A place, named by the words of what is changed."""
    return Plant(spot.statement.lineno, spot.function, words(node or spot.statement), apply)


def replace(spot: Spot, *new: Statement) -> Callable[[], None]:
    """Put other statements where this one is."""

    def apply() -> None:
        i = spot.position
        spot.body[i : i + 1] = list(new)

    return apply


def drop(spot: Spot) -> Callable[[], None]:
    """Leave a statement out."""
    return replace(spot, ast.Pass(lineno=spot.statement.lineno, col_offset=0))


def insert(spot: Spot, new: Statement, *, after: bool = False) -> Callable[[], None]:
    """Add a statement before or after this one."""

    def apply() -> None:
        spot.body.insert(spot.position + after, new)

    return apply


def move(spot: Spot, other: Spot, *, after: bool) -> Callable[[], None]:
    """Take a statement away and put it before or after another one, which may stand in another block."""

    def apply() -> None:
        statement = spot.statement
        i = spot.position
        spot.body[i : i + 1] = [ast.Pass(lineno=statement.lineno, col_offset=0)]
        other.body.insert(other.position + after, statement)

    return apply


def code(text: str) -> Statement:
    """One statement from text."""
    return ast.parse(text).body[0]


def expression(text: str) -> ast.expr:
    """An expression from text."""
    return ast.parse(text, mode="eval").body


def expressions(tree: ast.Module) -> Iterator[tuple[Spot, ast.AST]]:
    """Every node of every statement's own expressions, with the statement: what a block contains is its own statements'."""
    for spot in spots(tree):
        own = [v for f, v in ast.iter_fields(spot.statement) if f not in ("body", "orelse", "finalbody", "handlers")]
        for value in own:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    for node in ast.walk(item):
                        yield spot, node


def become(node: ast.AST, new: ast.AST) -> Callable[[], None]:
    """Turn one expression into another in place. `new` may contain a copy of the old one, not the node itself."""

    def apply() -> None:
        node.__class__ = type(new)  # type: ignore[assignment]
        node.__dict__.clear()
        node.__dict__.update(new.__dict__)

    return apply
