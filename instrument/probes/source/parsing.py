"""Source code of what runs, as syntax trees, and what its statements assign."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator, Sequence

MAX_SOURCE_CHARS = 1_000_000  # of a file
_MAX_FILES, _KEPT_FUNCTIONS = 64, 60
LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

Branch = tuple[int, bool, bool]  # an `if`, which side of it, and whether it is in a loop

_files: dict[str, tuple[ast.Module, dict[int, ast.FunctionDef]]] = {}  # parsed; functions by first line


def function_tree(code: types.CodeType) -> ast.FunctionDef | None:
    """The syntax tree of a function; `None` where there is no source, or it is something else (a lambda)."""
    found = _parsed(code.co_filename)
    tree = found[1].get(code.co_firstlineno) if found is not None else None
    return tree if tree is not None and tree.name == code.co_name else None


def module_tree(code: types.CodeType) -> ast.Module | None:
    """The syntax tree of a script."""
    found = _parsed(code.co_filename)
    return found[0] if found is not None else None


def forget() -> None:
    """Let go of the trees of long files: that of 5,000 lines takes 20 MB."""
    for path in [p for p, (_, functions) in _files.items() if len(functions) > _KEPT_FUNCTIONS]:
        del _files[path]


def _parsed(path: str) -> tuple[ast.Module, dict[int, ast.FunctionDef]] | None:
    if path not in _files:
        lines = linecache.getlines(path)
        try:
            tree = ast.parse("".join(lines)) if sum(map(len, lines)) <= MAX_SOURCE_CHARS else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.Module([], [])
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        first = {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f for f in functions}
        if len(_files) >= _MAX_FILES:
            del _files[next(iter(_files))]
        _files[path] = tree, first
    found = _files[path]
    return found if found[0].body else None


def statements(
    body: Sequence[ast.stmt], loops: tuple[int, ...], branches: tuple[Branch, ...]
) -> Iterator[tuple[ast.AST, tuple[int, ...], tuple[Branch, ...]]]:
    """Statements with the loops and the branches around them."""
    for statement in body:
        if isinstance(statement, _SCOPES):
            continue
        yield statement, loops, branches
        if isinstance(statement, LOOPS):
            yield from statements(statement.body, (*loops, id(statement)), branches)
            yield from statements(statement.orelse, loops, branches)
        elif isinstance(statement, ast.If):
            for part, side in ((statement.body, True), (statement.orelse, False)):
                yield from statements(part, loops, (*branches, (id(statement), side, bool(loops))))
        else:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                    yield from statements(inner, loops, branches)
            for handler in getattr(statement, "handlers", ()):
                yield from statements(handler.body, loops, (*branches, (id(handler), True, bool(loops))))


def calls_of(node: ast.AST) -> Iterator[ast.Call]:
    """Calls of a statement itself, not of the statements inside."""
    waiting = [node]
    while waiting:
        here = waiting.pop(0)
        if isinstance(here, ast.Call):
            yield here
        waiting += [n for n in ast.iter_child_nodes(here) if not isinstance(n, (ast.stmt, ast.excepthandler, *_SCOPES))]


def written(node: ast.AST) -> list[str]:
    """Names and attributes that a statement (not those inside it) or a target assigns."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return written(node.target)
    if isinstance(node, ast.With | ast.AsyncWith):
        return [n for item in node.items if item.optional_vars is not None for n in written(item.optional_vars)]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n for t in targets for n in written(t)]
    if isinstance(node, ast.Tuple | ast.List):
        return [n for e in node.elts for n in written(e)]
    if isinstance(node, ast.Starred):
        return written(node.value)
    name = dotted(node) if isinstance(node, ast.expr) else ""
    return [name] if name else []


def written_by(node: ast.AST) -> list[str]:
    """`written` of a statement; nothing of an expression, whose names are read."""
    return written(node) if isinstance(node, ast.stmt) else []


def pairs(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and values, tuples element by element."""
    if statement.value is None:
        return []
    if isinstance(statement, ast.AugAssign):
        return [(statement.target, ast.BinOp(statement.target, statement.op, statement.value))]
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    found: list[tuple[ast.expr, ast.expr]] = []
    for target in targets:
        value = statement.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
        if both and isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            found += list(zip(target.elts, value.elts))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            found += [(t, ast.Subscript(value, ast.Constant(i), ast.Load())) for i, t in enumerate(target.elts)]
        else:
            found.append((target, value))
    return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression, "" of any other."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=attribute):
            owner = dotted(inner)
            return f"{owner}.{attribute}" if owner else ""
    return ""
