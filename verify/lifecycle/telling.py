"""When people are told of an incident: when it is believed, when it becomes louder, and when it is over.

Of one key they are never told that it is over without having been told that it began, and what keeps coming back is told
a few times an hour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from proctor.invariants.invariant import Tier
from proctor.verify.lifecycle.notices import notice
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.lifecycle.record import State, TrackedIncident
from proctor.verify.notice import Action, Notice

_HOUR_S: Final = 3600.0


class Teller:
    """Collects what is to be told.

    Args:
        job, host: of which people are told.
        run: the run directory as commands should name it.
        policy: how often they are told again.
        time: seconds on a time line that does not jump.
        wall: epoch seconds.
    """

    def __init__(
        self, job: str, host: str, run: str, policy: Policy, time: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._job, self._host, self._run, self._policy = job, host, run, policy
        self._time, self._wall = time, wall
        self._told: list[Notice] = []
        self._fresh: set[str] = set()  # keys that nobody knew of before what is in `_told`

    def tell(self, incident: TrackedIncident) -> None:
        """What people do not know of an incident yet, if it is time to tell them."""
        if incident.state is State.RESOLVED:
            if incident.said is not None:
                incident.said = None
                if not (incident.merged and self._untell(incident.key)):
                    self._send(incident, Action.RESOLVE)
        elif incident.state is State.FIRING and self._news(incident):
            if incident.said is None:
                self._fresh.add(incident.key)
            incident.said = (incident.severity, incident.tier)
            self._send(incident, Action.TRIGGER)

    def _news(self, incident: TrackedIncident) -> bool:
        if incident.said is not None:
            severity, tier = incident.said
            return incident.severity.level > severity.level or (incident.tier is Tier.PAGE and tier is not Tier.PAGE)
        if not incident.flaps:
            return True
        now = self._time()
        incident.told_at = [at for at in incident.told_at if now - at < _HOUR_S]
        if len(incident.told_at) >= self._policy.max_retriggers_per_hour:
            return False
        incident.told_at.append(now)
        return True

    def _untell(self, key: str) -> bool:
        """Whether people did not know yet: what was to be told of this key is told no more."""
        if key not in self._fresh or any(n.key == key and n.action is Action.RESOLVE for n in self._told):
            return False
        self._told = [n for n in self._told if n.key != key]
        return True

    def take(self) -> list[Notice]:
        """What is to be told, in order; once."""
        told, self._told = self._told, []
        self._fresh.clear()
        return told

    def _send(self, incident: TrackedIncident, action: Action) -> None:
        self._told.append(notice(incident, action, job=self._job, host=self._host, at=self._wall(), run=self._run))
