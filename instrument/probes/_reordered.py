"""Arguments of a function of which some are put into the order of a sort and some are not, told from its source: used by `unread.py`. Nothing of the program runs."""

from __future__ import annotations

import ast
import types
from typing import Final, NamedTuple

from proctor.instrument.probes._wasted import arguments_of
from proctor.instrument.probes.source.parsing import function_tree

_SORTS: Final = frozenset({"sort", "argsort"})
_PAIRS: Final = 8  # of a function


class Reordered(NamedTuple):
    """An argument that is put into an order, and another one that is not and is read behind."""

    moved: str
    order: str
    left: str


def reordered(code: types.CodeType) -> list[Reordered]:
    """Pairs of arguments that may come apart: `a = a[order]`, with an order that a sort gave and that is used for nothing else but to index, and to be returned; `b` is not indexed by it, and read behind that line."""
    names = set(code.co_names) | set(code.co_varnames)
    if not names & _SORTS or code.co_argcount < 2:
        return []
    tree = function_tree(code)
    if tree is None:
        return []
    orders = {name for node in ast.walk(tree) if isinstance(node, ast.Assign) and _sorts(node.value) for name in _last_names(node.targets)}
    returned = {id(n) for node in ast.walk(tree) if isinstance(node, ast.Return) for n in ast.walk(node)}
    indexed: dict[str, set[str]] = {}
    slices: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            slices.add(id(node.slice))
            indexed.setdefault(node.slice.id, set()).update(n.id for n in ast.walk(node.value) if isinstance(n, ast.Name))
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            continue
        moved, order = node.targets[0].id, node.value.slice.id if isinstance(node.value, ast.Subscript) and isinstance(node.value.slice, ast.Name) else ""
        arguments = arguments_of(code)
        if order not in orders or moved not in arguments or not isinstance(node.value, ast.Subscript) or not isinstance(node.value.value, ast.Name) or node.value.value.id != moved:
            continue
        if any(n.id == order and id(n) not in slices and id(n) not in returned for n in loads):
            continue  # it may be turned round, or handed to who puts the other in order
        for other in arguments:
            if other not in indexed[order] and other != "self" and any(n.id == other and n.lineno > node.lineno and id(n) not in returned for n in loads):
                found.append(Reordered(moved, order, other))
    return found[:_PAIRS]


def _sorts(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SORTS


def _last_names(targets: list[ast.expr]) -> list[str]:
    """The variable of an order: the only one, or the last of two."""
    ends = [target.elts[-1] if isinstance(target, ast.Tuple) and target.elts else target for target in targets]
    return [end.id for end in ends if isinstance(end, ast.Name)]
