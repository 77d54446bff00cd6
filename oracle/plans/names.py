"""Names of a plan: patterns, and new names with sums in them ("layers.{g1 + 2*pp}.\\2")."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Final

from proctor.errors import OracleError
from proctor.oracle.plans.patterns import unbounded

_MOST_PATTERN: Final = 2000
_MOST_NUMBER: Final = 10**9
_HOLE: Final = re.compile(r"\{([^{}]*)\}")
_OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ALLOWED: Final = "+ - * // % over whole numbers, groups (g1, g2, or their names) and mesh axes"


@functools.lru_cache(4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression.

    Raises:
        OracleError: it is none, or one that may match for ever.
    """
    if len(pattern) > _MOST_PATTERN:
        raise OracleError(f"a pattern of {len(pattern)} characters is longer than {_MOST_PATTERN}")
    try:
        made = re.compile(pattern)
        endless = unbounded(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise OracleError(f"{pattern[:80]!r} is no regular expression: {error}") from None
    if endless:
        raise OracleError(f"{pattern[:80]!r} may match for ever: {endless}", hint=r"name the parts one by one: layers\.\d+\.attn\..*")
    return made


@functools.lru_cache(4096)
def template(pattern: str, to: str) -> tuple[str | ast.expr, ...]:
    """The new name as texts (with \\1 in them) and sums.

    Raises:
        OracleError: a sum has something in it that is not allowed, or the text refers to a group that is not there.
    """
    if len(to) > _MOST_PATTERN:
        raise OracleError(f"a new name of {len(to)} characters is longer than {_MOST_PATTERN}")
    groups, end = compiled(pattern), 0
    parts: list[str | ast.expr] = []
    for hole in _HOLE.finditer(to):
        parts.append(to[end : hole.start()])
        parts.append(_sum(hole[1], to, groups))
        end = hole.end()
    parts.append(to[end:])
    for text in parts:
        for group in re.findall(r"\\(\d+)", text) if isinstance(text, str) else ():
            if int(group) > groups.groups:
                raise OracleError(f"{to[:80]!r} refers to group {group}; {pattern[:80]!r} has {groups.groups}")
        for name in re.findall(r"\\g<([^>]*)>", text) if isinstance(text, str) else ():
            if not (name.isdigit() and int(name) <= groups.groups) and name not in groups.groupindex:
                raise OracleError(f"{to[:80]!r} refers to group {name[:40]!r}, which {pattern[:80]!r} does not have")
    return tuple(parts)


def renamed(name: str, pattern: str, to: str, coords: Mapping[str, int]) -> str | None:
    """The new name, or None when the pattern does not match the whole name.

    Raises:
        OracleError: a sum is over a group that is not a number, or divides by 0.
    """
    match = compiled(pattern).fullmatch(name)
    if match is None:
        return None
    found = []
    for part in template(pattern, to):
        if isinstance(part, str):
            found.append(_text(part, match))
        else:
            found.append(str(_value(part, match, coords, to)))
    return "".join(found)


def _text(part: str, match: re.Match[str]) -> str:
    def group(ref: re.Match[str]) -> str:
        key = ref[1] or ref[2]
        return match[int(key) if key.isdigit() else key] or ""

    return re.sub(r"\\(?:(\d+)|g<([^>]*)>)", group, part).replace("\\.", ".")


def _sum(text: str, to: str, groups: re.Pattern[str]) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.Constant(None)
    for node in ast.walk(tree):
        fine = (
            (isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS)
            or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub))
            or (isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _MOST_NUMBER)
            or isinstance(node, ast.Name | ast.operator | ast.unaryop | ast.expr_context)
        )
        if not fine:
            raise OracleError(f"{{{text[:80]}}} in {to[:80]!r} is not a sum", hint=f"allowed: {_ALLOWED}")
        if isinstance(node, ast.Name) and re.fullmatch(r"g\d+", node.id) and int(node.id[1:]) > groups.groups:
            raise OracleError(f"{to[:80]!r} refers to group {node.id}; the pattern has {groups.groups}")
    return tree


def _value(node: ast.expr, match: re.Match[str], coords: Mapping[str, int], to: str) -> int:
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, match, coords, to)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, match, coords, to), _value(node.right, match, coords, to)
        if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
            raise OracleError(f"{to[:80]!r} divides by 0 for {match[0][:80]!r}")
        value = _OPERATORS[type(node.op)](left, right)
        if abs(value) > _MOST_NUMBER:
            raise OracleError(f"{to[:80]!r} gives a number beyond {_MOST_NUMBER}")
        return value
    assert isinstance(node, ast.Name)
    if re.fullmatch(r"g\d+", node.id):
        text = match[int(node.id[1:])]
    elif node.id in match.re.groupindex:
        text = match[node.id]
    elif node.id in coords:
        return coords[node.id]
    else:
        raise OracleError(f"{to[:80]!r}: {node.id[:40]!r} is neither a group nor a mesh axis", hint=f"allowed: {_ALLOWED}")
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        raise OracleError(f"{to[:80]!r}: group {node.id} of {match[0][:80]!r} is not a number")
    return int(text)
