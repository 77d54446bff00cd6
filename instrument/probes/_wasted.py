"""What a function computes and does not read, told from its code and its source: used by `unread.py`. Nothing of the program runs."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from proctor.instrument.probes.source.parsing import function_tree

_PUTS: Final = frozenset({"append", "extend"})
_NAMES: Final = 4  # of a function


class Wasted(NamedTuple):
    """A variable that no line of its function reads."""

    name: str
    listed: bool  # it is a list that things are put into
    twin: str  # a variable that is made in the same way and is read; "": none
    written: bool = False  # lines put items into it


def arguments_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of the arguments of a function, but for those that take what is left over."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def wasted(code: types.CodeType, read: set[str]) -> list[Wasted]:
    """Variables of a function that are made by an expression of their own and that none of its lines reads.

    Args:
        code: of the function.
        read: names that it reads.
    """
    arguments = set(arguments_of(code))
    idle = {name for name in code.co_varnames if name not in read and name not in arguments}
    filled = _filled(code) - arguments
    written = _written(code) - arguments
    names = {name for name in idle | filled | written if not name.startswith("_")}
    tree = function_tree(code) if names else None
    if tree is None:
        return []
    assigned, others = _assigned(tree)
    found = []
    for name in sorted(names - others):
        made = assigned.get(name, [])
        if name in written:
            found += [Wasted(name, listed=False, twin="", written=True)] if made else []
        elif name in filled:
            if made and all(isinstance(value, ast.List) and not value.elts for value in made):
                found.append(Wasted(name, listed=True, twin=""))
        elif made and all(isinstance(value, ast.Call | ast.Subscript | ast.BinOp) and not _taken(value) for value in made):
            twins = [(_common(made[-1], value), value.lineno < made[-1].lineno, -abs(value.lineno - made[-1].lineno), other) for other, values in assigned.items() if other in read and other != name
                     for value in values if _form(value) == _form(made[-1])]  # fmt: skip
            twin = max(twins, default=(0, False, 0, ""))[-1]
            found.append(Wasted(name, listed=False, twin=twin))
    return found[:_NAMES]


def _filled(code: types.CodeType) -> set[str]:
    """Variables that are loaded for nothing but to put something into them."""
    steps = list(dis.get_instructions(code))
    put: set[str] = set()
    else_where: set[str] = set(code.co_cellvars) | set(code.co_freevars)
    for at, one in enumerate(steps):
        if not one.opname.startswith(("LOAD_FAST", "DELETE_", "STORE_FAST_LOAD")):
            continue
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        following = steps[at + 1] if at + 1 < len(steps) else None
        puts = following is not None and following.opname in ("LOAD_METHOD", "LOAD_ATTR") and following.argval in _PUTS
        else_where.update(names[:-1] if puts else names)
        put.update(names[-1:] if puts else ())
    return put - else_where


def _written(code: types.CodeType) -> set[str]:
    """Variables that are loaded for nothing but to put items into them, by their place or name."""
    steps = list(dis.get_instructions(code))
    put: set[str] = set()
    elsewhere: set[str] = set(code.co_cellvars) | set(code.co_freevars)
    for at, one in enumerate(steps):
        if not one.opname.startswith(("LOAD_FAST", "DELETE_", "STORE_FAST_LOAD")):
            continue
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        behind = [later for later in steps[at + 1 : at + 3] if later.opname != "CACHE"]
        puts = len(behind) == 2 and behind[0].opname.startswith(("LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT")) and behind[1].opname == "STORE_SUBSCR"
        elsewhere.update(names[:-1] if puts else names)
        put.update(names[-1:] if puts else ())
    return put - elsewhere


def _assigned(tree: ast.FunctionDef) -> tuple[dict[str, list[ast.expr]], set[str]]:
    """What plain assignments of a function give to its variables, and variables that something else gives a value to, or that are asked for within."""
    plain: dict[str, list[ast.expr]] = {}
    others: set[str] = set()
    for node in _statements(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            plain.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.stmt):
            heads = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
            others |= {n.id for head in heads for n in ast.walk(head) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store | ast.Del)}
            others |= set(node.names) if isinstance(node, ast.Global | ast.Nonlocal) else set()
    return plain, others


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(child)


def _taken(value: ast.expr) -> bool:
    """Whether this is a part of what has a name, by its number or key: nothing is computed, as where several names are unpacked from it."""
    if not isinstance(value, ast.Subscript):
        return isinstance(value, ast.Name | ast.Attribute)
    index = value.slice.operand if isinstance(value.slice, ast.UnaryOp) else value.slice
    return isinstance(index, ast.Constant) and _taken(value.value)


def _common(one: ast.expr, other: ast.expr) -> int:
    """How many variables two expressions share."""
    mine, theirs = ({n.id for n in ast.walk(e) if isinstance(n, ast.Name)} for e in (one, other))
    return len(mine & theirs)


def _form(node: Any) -> Any:
    """An expression without the names of its variables: who is called, and by which methods, stays."""
    if isinstance(node, ast.Name):
        return "a name"
    if isinstance(node, ast.Constant):
        return "a constant"
    if isinstance(node, ast.Call):
        who = ast.unparse(node.func) if isinstance(node.func, ast.Name) else _form(node.func)
        return ("call", who, tuple(map(_form, node.args)), tuple((k.arg, _form(k.value)) for k in node.keywords))
    if isinstance(node, ast.AST):
        return (type(node).__name__, *(_form(value) for field, value in ast.iter_fields(node) if field != "ctx"))
    return tuple(map(_form, node)) if isinstance(node, list) else node
