"""What a tired reader needs first: since when, where, what, and whether it goes on."""

from __future__ import annotations

from collections.abc import Mapping

from proctor.invariants.verdict import Incident
from proctor.verify.report import Report
from proctor.verify.report.formats.html.tensors import Tensor
from proctor.verify.wording import at_step, clean, count, ranges, short_name

Tile = tuple[str, str, str]  # label, value, more


def tiles(report: Report, apart: Mapping[str, Tensor]) -> list[Tile]:
    """Facts of the first incident; none where nothing was found.

    Args:
        report: what is shown.
        apart: by violation, the tensor whose replicas differ: it knows the ranks better than where the rule failed.
    """
    result = report.result
    if result is None or not result.incidents:
        return []
    first = result.incidents[0]
    steps = result.steps or (report.trace.steps if report.trace is not None else 0)
    since = ("Since", at_step(first.first_step), f"of {steps:,} steps" if steps else "")
    return [since, _where(first, result.ranks, apart.get(first.violations[0].id)), _what(first), _now(report, first, steps)]


def _where(incident: Incident, ranks: int, tensor: Tensor | None) -> Tile:
    if tensor is not None:
        noun = "rank" if len(tensor.minority) == 1 else "ranks"
        return "Where", f"{noun} {ranges(tensor.minority, 4)}", f"{'against the others, ' if tensor.majority else ''}of {count(ranks, 'rank')}"
    hit = {r for v in incident.violations for _, r in v.places if r is not None}
    if not hit or len(hit) >= ranks > 1:
        return "Where", "all ranks" if ranks != 1 else "rank 0", f"of {ranks}" if ranks > 1 else ""
    return "Where", f"{'rank' if len(hit) == 1 else 'ranks'} {ranges(hit, 4)}", f"of {count(ranks, 'rank')}" if ranks > 1 else ""


def _what(incident: Incident) -> Tile:
    first = incident.violations[0]
    name = first.variable or short_name(first.function) or first.module or first.relation
    names = {v.variable for v in incident.violations if v.variable} - {first.variable}
    more = [f"{first.code} {first.relation}", count(len(names), "more variable") if names else ""]
    return "What", clean(name, 60), clean(", ".join(m for m in more if m))


def _now(report: Report, incident: Incident, steps: int) -> Tile:
    rules = {v.id for v in incident.violations}
    followed = report.beside.incident_of(rules)
    if followed is not None:
        return "State", followed.state, followed.ended or (f"since {followed.began}" if followed.began else "")
    last = max((s for v in incident.violations for s, _ in v.places if s is not None), default=None)
    failing = count(sum(v.count for v in incident.violations), "failing example")
    if last is None or not steps:
        return "Extent", failing, ""
    goes_on = last >= steps - 1 - max(1, steps // 50)
    return "Extent", "to the end" if goes_on and steps > 1 else f"until {at_step(last)}", failing

