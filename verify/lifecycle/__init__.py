"""From violations to what people are told: one incident for one cause, believed, followed, over, and back again."""

from proctor.verify.lifecycle.book import IncidentBook
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.lifecycle.record import State, TrackedIncident

__all__ = ["IncidentBook", "Policy", "State", "TrackedIncident"]
