"""A plan held against the names of a model: what applies where, what applies nowhere, what contradicts itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from proctor.oracle.plans.mesh import Cut
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import WHICH, ActivationRule, Names, ParamRule, Plan, Row, Rule, Understanding

_SHOWN = 3


def understand(plan: Plan, params: Names, modules: Names = ()) -> Understanding:
    """See `Plan.understood`."""
    shapes, outputs = _shapes(params), _shapes(modules)
    rows: list[Row] = []
    warnings = [w for number, axes in _rules(plan) for w in _unknown_axes(plan, number, axes)]
    none, twice, ranges = [], Groups(), Groups()
    for name, shape in shapes.items():
        found = [r for r in plan.matching("param", name) if isinstance(r, ParamRule)]
        layout = plan.param_layout(name)
        rows.append(Row("param", name, str(layout or "replicated"), found[0].path if found else ""))
        if not found:
            none.append(name)
            continue
        for other in found[1:]:
            if other.rule.layout(plan.mesh) != layout and not _matches_all(other.path, shapes):
                twice.add((found[0].path, other.path), name)
        if shape is not None and layout is not None:
            for cut in _out_of_range(layout.cuts, len(shape)):
                ranges.add((found[0].path, str(cut)), f"{name} {list(shape)}")
    for name, shape in outputs.items():
        for which in WHICH:
            for rule in plan.activations:
                if not (compiled(rule.module).fullmatch(name) and which in rule.rules):
                    continue
                layout = rule.rules[which].layout(plan.mesh)
                rows.append(Row(which, name, _transposed(str(layout), rule), rule.module, "" if rule.slot == ".*" else rule.slot))
                if shape is not None and which == "output":
                    for cut in _out_of_range(layout.cuts, len(shape)):
                        ranges.add((rule.module, str(cut)), f"{name} {list(shape)}")
    if none and plan.params:
        said = f"{len(none)} parameters match no rule and count" if len(none) > 1 else "1 parameter matches no rule and counts"
        warnings.append(f"{said} as replicated: {_some(none)}")
    for (first, second), names in twice.items():
        warnings.append(
            f"{first!r} and {second!r} both match {_some(names)} and say different things; the first is taken"
        )
    for (path, said), names in ranges.items():
        warnings.append(f"{path!r} cuts {said}, a dimension that {_some(names)} does not have")
    if shapes:
        warnings += _idle("param", [r.path for r in plan.params], shapes, twice)
        warnings += [
            f"rename {r.pattern!r} matches no name"
            for r in plan.renames
            if not any(compiled(r.pattern).fullmatch(n) for n in (*shapes, *outputs))
            and (outputs or r.kind == "param")
        ]
    if outputs:
        warnings += _idle("activation", [r.module for r in plan.activations], outputs, Groups())
    return Understanding(tuple(rows), tuple(warnings))


class Groups(dict[tuple[str, str], list[str]]):
    """Names by what is said of them, so that one mistake is one warning."""

    def add(self, key: tuple[str, str], name: str) -> None:
        """Adds a name to a group."""
        self.setdefault(key, []).append(name)


def _shapes(names: Names) -> dict[str, Sequence[int] | None]:
    return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)


def _rules(plan: Plan) -> Iterable[tuple[str, Rule]]:
    for rule in plan.params:
        yield f"param {rule.path!r}", rule.rule
    for module in plan.activations:
        for which, one in module.rules.items():
            yield f"activation {module.module!r} {which}", one


def _unknown_axes(plan: Plan, where: str, rule: Rule) -> Iterable[str]:
    for axis in (name for cut in rule.cuts for name in cut.axis.split("+")):
        if plan.mesh.axes and axis not in plan.mesh.axes:
            close = difflib.get_close_matches(axis, plan.mesh.axes, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"{where}: the mesh ({plan.mesh}) has no axis {axis!r}, it counts as of size 1{hint}"


def _out_of_range(cuts: Iterable[Cut], ndim: int) -> list[Cut]:
    return [cut for cut in cuts if not cut.reduction and not -ndim <= cut.dim < ndim]


def _matches_all(pattern: str, names: Iterable[str]) -> bool:
    return all(compiled(pattern).fullmatch(name) for name in names)


def _idle(kind: str, patterns: Sequence[str], names: Mapping[str, object], twice: Groups) -> list[str]:
    """Rules that match nothing, and rules before which others always win."""
    found = []
    for at, pattern in enumerate(patterns):
        hits = [name for name in names if compiled(pattern).fullmatch(name)]
        if not hits:
            part = next((name for name in names if re.search(pattern, name)), None)
            close = difflib.get_close_matches(re.sub(r"\\d\+|\\|\(.*?\)|\*", "", pattern), list(names), 1, 0.6)
            hint = (
                f"; a pattern must match the whole name, e.g. {part!r}"
                if part
                else (f"; there is {close[0]!r}" if close else "")
            )
            found.append(f"{kind} {pattern!r} matches nothing{hint}")
        elif (
            kind == "param"
            and len(hits) < len(names)
            and not any(second == pattern for _, second in twice)
            and all(any(compiled(p).fullmatch(name) for p in patterns[:at]) for name in hits)
        ):
            found.append(f"{kind} {pattern!r} never applies: earlier rules match all that it matches")
    return found


def _transposed(layout: str, rule: ActivationRule) -> str:
    return f"{layout}, {rule.transpose}" if rule.transpose else layout


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

