"""Formulas of numbers: read from text, evaluated on columns, said in words.

A formula is JSON: a number, the name of a number, or a list of an operation and its operands. It comes from a trace or
a pack, so it is checked before use: known operations only, and bounded in size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Formula = str | float | tuple[Any, ...]
Column = NDArray[np.float64]

MAX_NODES: Final = 100
MAX_CHARS: Final = 20_000
_MAX_DEPTH: Final = 40

_OPERATIONS: Final[dict[str, tuple[int, int, Callable[..., Any]]]] = {  # least and most operands
    "+": (2, 2, np.add),
    "-": (2, 2, np.subtract),
    "*": (2, 2, np.multiply),
    "/": (2, 2, np.divide),
    "//": (2, 2, np.floor_divide),
    "%": (2, 2, np.mod),
    "**": (2, 2, np.power),
    "<": (2, 2, np.less),
    "<=": (2, 2, np.less_equal),
    ">": (2, 2, np.greater),
    ">=": (2, 2, np.greater_equal),
    "==": (2, 2, np.equal),
    "!=": (2, 2, np.not_equal),
    "and": (2, 8, lambda *a: _fold(lambda x, y: np.where(x != 0, y, x), a)),
    "or": (2, 8, lambda *a: _fold(lambda x, y: np.where(x != 0, x, y), a)),
    "max": (2, 8, lambda *a: _fold(np.maximum, a)),
    "min": (2, 8, lambda *a: _fold(np.minimum, a)),
    "neg": (1, 1, np.negative),
    "not": (1, 1, lambda a: a == 0),
    "bool": (1, 1, lambda a: a != 0),
    "int": (1, 1, np.trunc),
    "float": (1, 1, lambda a: a),
    "round": (1, 1, np.rint),
    "abs": (1, 1, np.abs),
    "ceil": (1, 1, np.ceil),
    "floor": (1, 1, np.floor),
    "sqrt": (1, 1, np.sqrt),
    "exp": (1, 1, np.exp),
    "log": (1, 1, np.log),
    "cos": (1, 1, np.cos),
    "if": (3, 3, lambda c, a, b: np.where(np.isnan(c), np.nan, np.where(c != 0, a, b))),
}
_COMPARE: Final = frozenset({"<", "<=", ">", ">=", "==", "!=", "not", "bool"})
_BINDS: Final = {"or": 1, "and": 2, "<": 3, "<=": 3, ">": 3, ">=": 3, "==": 3, "!=": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5, "**": 6}


def _fold(combine: Callable[[Any, Any], Any], columns: Sequence[Any]) -> Any:
    result = columns[0]
    for column in columns[1:]:
        result = combine(result, column)
    return result


@lru_cache(maxsize=65536)
def parse(text: str) -> tuple[Formula, ...]:
    """The alternatives that a text lists; () where it is not such a list."""
    try:
        tree = json.loads(text) if len(text) <= MAX_CHARS else None
        if not isinstance(tree, list):
            return ()
        found = tuple(_checked(f, [MAX_NODES], 0) for f in tree)
    except (ValueError, RecursionError):
        return ()
    return found


def _checked(tree: Any, left: list[int], depth: int) -> Formula:
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        raise ValueError("too long")
    if isinstance(tree, str):
        return tree
    if isinstance(tree, bool | int | float):
        return float(tree)
    if not isinstance(tree, list) or not tree or not isinstance(tree[0], str) or tree[0] not in _OPERATIONS:
        raise ValueError("no formula")
    least, most, _ = _OPERATIONS[tree[0]]
    if not least <= len(tree) - 1 <= most:
        raise ValueError("no formula")
    return (tree[0], *(_checked(part, left, depth + 1) for part in tree[1:]))


def operands(formula: Formula) -> frozenset[str]:
    """Names that a formula reads."""
    if isinstance(formula, str):
        return frozenset({formula})
    if isinstance(formula, tuple):
        return frozenset().union(*(operands(part) for part in formula[1:]))
    return frozenset()


def evaluate(formula: Formula, columns: Mapping[str, Column]) -> Column | float:
    """Values of a formula, row by row; NaN where an operand is NaN or the result is not a number.

    Args:
        columns: values of every operand.
    """
    if isinstance(formula, str):
        return columns[formula]
    if not isinstance(formula, tuple):
        return formula
    values = [evaluate(part, columns) for part in formula[1:]]
    with np.errstate(all="ignore"):
        result = np.asarray(_OPERATIONS[formula[0]][2](*values), dtype=np.float64)
        if formula[0] in _COMPARE:
            missing = np.any([np.isnan(np.broadcast_to(v, result.shape)) for v in values], axis=0)
            result = np.where(missing, np.nan, result)
    return np.where(np.isfinite(result), result, np.nan)


def words(formula: Formula, outer: int = 0) -> str:
    """A formula as one would write it."""
    if isinstance(formula, str):
        return formula
    if not isinstance(formula, tuple):
        return f"{formula:g}"
    operation, parts = formula[0], formula[1:]
    if operation == "if":
        return f"({words(parts[1])} if {words(parts[0])} else {words(parts[2])})"
    if operation == "neg":
        return f"-{words(parts[0], 6)}"
    binds = _BINDS.get(operation)
    if binds is None:
        return f"{operation}({', '.join(words(p) for p in parts)})"
    text = f" {operation} ".join(words(p, binds + (i > 0)) for i, p in enumerate(parts))
    return f"({text})" if binds < outer else text
