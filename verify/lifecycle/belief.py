"""What one incident says by itself: whether it is believed, whether it is over, how loud it is, and what it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from proctor.invariants.invariant import Severity, Tier
from proctor.invariants.verdict import Violation
from proctor.verify.incident import title, urgency
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.lifecycle.record import MAX_KEPT, TrackedIncident

MAX_FLAPS: Final = 20  # more do not ask for more
_MAX_DOUBLINGS: Final = 5


def believed(incident: TrackedIncident, policy: Policy) -> bool:
    """Whether a rule of it failed often enough to be told, and failed last; one that comes and goes must fail more often."""
    more = min(incident.flaps, MAX_FLAPS)
    k, n = policy.confirm_k + more, policy.confirm_n + more
    return any(rule.past.endswith("x") and (rule.confirm == "at once" or rule.past[-n:].count("x") >= k) for rule in incident.rules.values())


def clean_steps(incident: TrackedIncident, policy: Policy) -> int:
    """Evaluations in which each of its rules must hold before it is over; twice as many each time it came back."""
    return policy.clean << min(incident.flaps, _MAX_DOUBLINGS)


def has_ended(incident: TrackedIncident, policy: Policy, now: float) -> bool:
    """Whether its rules have held for long enough, in evaluations and in seconds."""
    return all_clean(incident, clean_steps(incident, policy)) and now - incident.failed_at >= policy.hold_s


def all_clean(incident: TrackedIncident, n: int) -> bool:
    """Whether each of its rules held in its last n evaluations."""
    return all(rule.clean >= n for rule in incident.rules.values())


def foremost(violations: Iterable[Violation], upstream: Mapping[str, int]) -> list[Violation]:
    """Those that are kept, the most upstream first."""
    return sorted(violations, key=lambda v: urgency(v, upstream))[:MAX_KEPT]


def name_by_head(incident: TrackedIncident) -> None:
    """Title, code and first step are those of the violation that is the most upstream now."""
    incident.beside = max(0, len(incident.rules) - len(incident.violations))
    if incident.violations:
        head = incident.violations[0]
        incident.title = title(head, beside=len(incident.rules) - 1 if incident.storm else 0)
        incident.code, incident.first_step = head.code, head.step


def louder(incident: TrackedIncident, severity: Severity, tier: Tier) -> None:
    """It is at least as severe as this, and pages if either does."""
    incident.severity = max(incident.severity, severity, key=lambda s: s.level)
    incident.tier = Tier.PAGE if Tier.PAGE in (incident.tier, tier) else Tier.TICKET
