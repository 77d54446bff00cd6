"""A recorded run and what a check found in it, written to a tool afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proctor.invariants.verdict import Incident, Violation
from proctor.verify import wording
from proctor.verify.writers import Writer


def write_run(
    writer: Writer, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], incidents: Sequence[Incident]
) -> int:
    """Write curves step by step, with each incident after the step that it began in; returns how many points.

    Args:
        writer: an open run of a tool; stays open.
        curves: name → steps and values, from `verify.series.curves`.
        incidents: of a check result.
    """
    by_step: dict[int, dict[str, float]] = {}
    for name, (steps, values) in curves.items():
        for step, value in zip(steps, values):
            by_step.setdefault(step, {})[name] = value
    waiting = sorted(incidents, key=_begins)
    for step in sorted(by_step):
        while waiting and _begins(waiting[0]) < step:
            write_incident(writer, waiting.pop(0))
        writer.series(step, by_step[step])
    for incident in waiting:
        write_incident(writer, incident)
    return sum(len(points) for points in by_step.values())


def _begins(incident: Incident) -> int:
    return -1 if incident.first_step is None else incident.first_step


def write_incident(writer: Writer, incident: Incident) -> None:
    """Write what an on-call engineer reads first."""
    first = incident.violations[0]
    severity = max((v.severity for v in incident.violations), key=lambda s: s.level)
    writer.incident(incident.first_step, wording.clean(incident.title, 200), _text(first, len(incident.violations)), severity)


def _text(first: Violation, rules: int) -> str:
    said = {
        "rule": first.text,
        "expected": first.expected,
        "seen": first.seen,
        "where": wording.place(first),
        "spread": wording.spread(first),
        "to blame": wording.blamed(first),
        "next": first.advice,
        "id": f"{first.code} {first.id}",
    }
    lines = [f"{name}: {wording.clean(text, 500)}" for name, text in said.items() if text]
    if rules > 1:
        lines.append(f"and {wording.count(rules - 1, 'more violated rule')} of the same cause")
    return "\n".join(lines)
