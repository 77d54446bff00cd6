"""What the names of a function hold: the formulas of their assignments, where the last look at them is not out of date.

A name has no formula that only some branch of a loop assigns, or whose operands change in a loop that it is not
assigned in; several assignments follow each other or are alternatives.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from proctor.instrument.probes.source.formulas import MAX_NODES, Formula, Reader, operands, prefixes, size
from proctor.instrument.probes.source.parsing import (
    LOOPS,
    Branch,
    calls_of,
    dotted,
    pairs,
    statements,
    written,
)

MAX_ALTERNATIVES = 4  # assignments of one name


@dataclass(frozen=True)
class _Assigned:
    """One assignment of a name."""

    loops: tuple[int, ...]  # around it, outermost first
    branches: tuple[Branch, ...]
    value: ast.expr | None  # `None`: not an expression of its own


@dataclass
class Made:
    """What a function makes.

    Args:
        names: formulas of names and attributes (`total`, `self.total`): one of them gave the value.
        through: functions that the values of names come through, whether or not there is a formula.
        built: names that hold what a call built, with that call: `loader` ← `DataLoader(…, batch_size=…)`.
        calls: `.backward()` and others, by the last part of what is called, in the order of the source.
    """

    names: dict[str, list[Formula]] = field(default_factory=dict)
    through: dict[str, str] = field(default_factory=dict)
    built: dict[str, ast.Call] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)


def made(tree: ast.AST, reader: Reader, given: frozenset[str]) -> Made:
    """What the body of a function (or a module) makes.

    Args:
        tree: of the function.
        reader: translates its expressions.
        given: names of calls of interest: backward, clip_grad_norm_.
    """
    out = Made()
    found: dict[str, list[_Assigned]] = {}
    for node, loops, branches in statements(getattr(tree, "body", []), (), ()):
        for call in calls_of(node):
            last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if last in given:
                out.calls.setdefault(last, []).append(call)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target, value in pairs(node):
                plain = dotted(target)
                for name in [plain] if plain else written(target):
                    found.setdefault(name, []).append(_Assigned(loops, branches, value if plain else None))
        else:
            within = (*loops, id(node)) if isinstance(node, LOOPS) else loops
            for name in written(node):
                found.setdefault(name, []).append(_Assigned(within, branches, None))
    for name, assigned in found.items():
        if len(assigned) == 1 and isinstance(assigned[0].value, ast.Call):
            out.built[name] = assigned[0].value
        reader.through.clear()
        alternatives = _alternatives(name, assigned, reader.formula, found)
        if reader.through:
            out.through[name] = ",".join(sorted(reader.through))
        if alternatives and not all(isinstance(f, int | float) for f in alternatives):
            out.names[name] = alternatives
    return out


def _alternatives(
    name: str,
    assigned: Sequence[_Assigned],
    read: Callable[[ast.expr], Formula | None],
    found: Mapping[str, Sequence[_Assigned]],
) -> list[Formula]:
    """What a name may hold after these assignments; none where that cannot be said."""
    current: list[tuple[_Assigned, Formula]] = []
    for one in assigned:
        formula = read(one.value) if one.value is not None else None
        if formula is None or not _lasting(operands(formula) - {name}, one.loops, found) or _skipped(one, assigned, "." in name):
            return []
        if name in operands(formula):  # `loss = loss / accum`: of what it was just before
            before = [(old, f) for old, f in current if old.loops == one.loops]
            if len(before) != 1 or len(current) != 1:
                return []
            formula = _replaced(formula, name, before[0][1])
        if all(old.loops == one.loops and old.branches[: len(one.branches)] == one.branches for old, _ in current):
            current = []
        current.append((one, formula))
    formulas = [f for _, f in current if size(f) <= MAX_NODES]
    return formulas if len(formulas) == len(current) <= MAX_ALTERNATIVES else []


def _skipped(one: _Assigned, assigned: Sequence[_Assigned], attribute: bool) -> bool:
    """Whether the program may go past an assignment and leave an old value: an `if` without its other side.

    Args:
        attribute: it may have a value from before this function.
    """

    def sides(other: _Assigned) -> list[Branch]:
        return [b for b in other.branches if b[2] or attribute]

    around = sides(one)
    for at, (place, side, looped) in enumerate(around):
        others = [o for o in assigned if o is not one and o.loops == one.loops]
        opposite = any((place, not side, looped) in o.branches and sides(o)[:at] == around[:at] for o in others)
        if not opposite and not any(sides(o) == around[:at] for o in others):  # nor assigned before, in the same round
            return True
    return False


def _replaced(formula: Formula, name: str, by: Formula) -> Formula:
    if isinstance(formula, list):
        return [formula[0], *(_replaced(part, name, by) for part in formula[1:])]
    return by if formula == name else formula


def _lasting(names: set[str], loops: tuple[int, ...], found: Mapping[str, Sequence[_Assigned]]) -> bool:
    """No operand changes in a loop that the assignment is not part of."""
    roots = {n for path in names for n in prefixes(path)}
    return all(o.loops == loops[: len(o.loops)] for n in roots for o in found.get(n, ()))
