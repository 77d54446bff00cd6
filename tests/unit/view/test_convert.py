"""Incidents of the book as events."""

from __future__ import annotations

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.lifecycle.record import State, TrackedIncident
from proctor.verify.view.convert import incident_event


def test_an_incident_about_the_monitor_and_one_that_is_over():
    made = TrackedIncident(
        key="k", title="t", severity=Severity.WARNING, tier=Tier.TICKET, code="PR201", began=1.0, number=1,
        state=State.RESOLVED, ended=5.0, why_ended="records arrive again", facts={"Lost": "4 records"}, ranks="1 of 2: 0",
    )  # fmt: skip
    event = incident_event(made)
    assert (event.state, event.severity, event.tier, event.ended) == ("resolved", "warning", "ticket", 5.0)
    assert event.details == {"Lost": "4 records", "Ended": "records arrive again"}
