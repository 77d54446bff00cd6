"""A derived plan as a person would write it: rules that say the same of several names are one, and rules of no name are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import torch

from proctor.oracle.parallel.deriving.patterns import joined
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import EdgeRule

R = TypeVar("R", bound=msgspec.Struct)


def shorter(plan: Plan, model: torch.nn.Module) -> Plan:
    """The plan with fewer rules.

    Args:
        plan: stays as it is; no two of its rules are about one name and differ.
        model: has the names.
    """
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))]
    made = plan.on(plan.mesh)
    made.params = _merged((r for r in plan.params if any(compiled(r.path).fullmatch(name) for name in names)), "path", lambda r: r.rule)
    made.edges = _merged(map(_said, plan.edges), "module", lambda r: (r.at, tuple(r.rules.items()), r.slot, r.after, r.lookup))
    made.pendings = _merged(plan.pendings, "path", lambda r: (r.axes, r.reduce))
    made.sizes = _merged(plan.sizes, "module", lambda r: (r.names, r.axis))
    return made


def _said(edge: EdgeRule) -> EdgeRule:
    """What is whole need not be said, but for a gradient that would else go the way its tensor came."""
    needed = {way: rule for way, rule in edge.rules.items() if rule.cuts or way not in ("from", "to")}
    return msgspec.structs.replace(edge, rules=needed) if needed or edge.after or edge.lookup else edge


def _merged(rules: Iterable[R], name: str, said: Callable[[R], Any]) -> list[R]:
    """Rules that say the same become the first of them; one on the model itself stays alone."""
    found: dict[Any, list[R]] = {}
    for rule in rules:
        pattern = getattr(rule, name)
        found.setdefault((said(rule), pattern if pattern in ("", ".*") else None), []).append(rule)
    return [msgspec.structs.replace(group[0], **{name: joined(getattr(rule, name) for rule in group)}) for group in found.values()]
