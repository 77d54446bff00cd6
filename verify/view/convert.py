"""An incident of the book as an event of the live view: what somebody who is paged looks at first."""

from __future__ import annotations

from proctor.verify.lifecycle.record import TrackedIncident
from proctor.verify.view.events import IncidentEvent
from proctor.verify.wording import blamed, place, rate, support


def incident_event(incident: TrackedIncident) -> IncidentEvent:
    """Its state now."""
    details = dict(incident.facts)
    if incident.violations:
        first = incident.violations[0]
        rows = (
            ("Rule", f"{first.text} ({first.id})"),
            ("Expected", first.expected),
            ("Seen", first.seen),
            ("Where", place(first)),
            ("To blame", blamed(first)),
            ("Look at", first.advice),
            ("Support", support(first.support)),
            ("False alarms", rate(first.false_alarm) if first.false_alarm is not None else ""),
        )
        details |= {label: text for label, text in rows if text}
    if incident.why_ended:
        details["Ended"] = incident.why_ended
    if incident.not_kept and not incident.capsule:
        details["Capsule"] = incident.not_kept
    return IncidentEvent(
        key=incident.key,
        title=incident.title,
        state=incident.state.value,
        severity=incident.severity.value,
        tier=incident.tier.value,
        code=incident.code,
        first_step=incident.first_step,
        began=incident.began,
        ended=incident.ended or 0.0,
        ranks=incident.ranks,
        axis=incident.axis,
        rules=max(1, len(incident.violations) + incident.beside),
        flaps=incident.flaps,
        details=details,
        capsule=incident.capsule,
    )
