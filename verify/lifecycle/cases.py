"""The incidents of a job: opened, joined, believed, merged, over, back again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.incident import start, title, urgency
from proctor.verify.lifecycle.belief import (
    MAX_FLAPS,
    all_clean,
    believed,
    clean_steps,
    foremost,
    has_ended,
    louder,
    name_by_head,
)
from proctor.verify.lifecycle.belonging import Belonging, keys_of
from proctor.verify.lifecycle.deviation import WORLD, Coords, deviation
from proctor.verify.lifecycle.evaluations import Failure
from proctor.verify.lifecycle.notices import dedup_key
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.lifecycle.record import (
    MAX_KEPT,
    MAX_RANKS,
    MAX_RULES,
    Rule,
    State,
    TrackedIncident,
    slim,
)
from proctor.verify.lifecycle.telling import Teller
from proctor.verify.wording import count

MAX_OVER: Final = 100  # incidents that are over and still kept
_PAST: Final = 128  # evaluations of a rule that are kept
_BEGUN_STEPS: Final = 64  # steps of which it is known what began to fail at them


class Cases:
    """Open incidents, and the last of those that are over.

    Args:
        job, host: of which people are told.
        run: the run directory as commands should name it.
        policy: numbers.
        upstream: rank of each relation, lower is nearer to the cause.
        time: seconds on a time line that does not jump and goes on over restarts.
        wall: epoch seconds.
    """

    def __init__(
        self,
        job: str,
        host: str,
        run: str,
        policy: Policy,
        upstream: Mapping[str, int],
        time: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.job, self.policy = job, policy
        self.teller = Teller(job, host, run, policy, time, wall)
        self.open: dict[int, TrackedIncident] = {}
        self.over: list[TrackedIncident] = []
        self.begun: dict[int, list[str]] = {}
        self.number = 0
        self._upstream, self._time, self._wall = upstream, time, wall
        self._owner: dict[str, int] = {}
        self._belonging = Belonging()
        self._touched: set[int] = set()

    @property
    def followed(self) -> Mapping[str, int]:
        """Rules of open incidents, each with the number of its incident."""
        return self._owner

    def restore(self, incidents: Iterable[TrackedIncident], begun: Mapping[int, list[str]], number: int) -> None:
        """Carry on with incidents as they were. What was not seen meanwhile is no evidence that one is over."""
        for incident in incidents:
            incident.doubted = True
            if incident.open:
                self._keep(incident)
            else:
                self.over.append(incident)
        self.begun, self.number = {step: list(ids) for step, ids in begun.items()}, number

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def failed(self, failure: Failure, step: int, ranks: int, coords: Coords, partners: Iterable[str]) -> None:
        """A rule failed in a step: it goes on, joins an incident, brings one back, or opens one."""
        v = failure.violation
        number = self._owner.get(v.id)
        if number is None:
            self._began(start(v), v.id)
            keys = keys_of(v, ranks)
            found = self._belonging.find(keys, start(v), partners)
            incident = self._incident_for(failure, found, ranks, coords)
            self._belonging.add(incident, keys, start(v))
            self._join(incident, failure, ranks, coords)
        else:
            incident = self.open[number]
        rule = incident.rules.get(v.id)
        if rule is not None:
            if rule.seen is None or step >= rule.seen:  # else it was counted, before the verifier was started again
                rule.last, rule.seen, rule.fails = step, step, rule.fails + failure.fails
                rule.past = (rule.past + "x")[-_PAST:]
            rule.clean, rule.wide = 0, max(rule.wide, failure.wide)
        incident.failed_at = self._time()
        self._touched.add(incident.number)

    def held(self, rule_id: str, step: int, wide: int) -> None:
        """A rule was decided in a step, on so many examples, and held.

        A verifier that was started again reads the whole job once more: steps from before the failure, and steps that were counted, say
        nothing. Neither does a step that shows less than those that failed, where what is missing may be lost.
        """
        number = self._owner.get(rule_id)
        if number is None:
            return
        incident = self.open[number]
        rule = incident.rules[rule_id]
        if (rule.seen is not None and step <= rule.seen) or (incident.doubted and wide < rule.wide):
            return
        rule.seen = step
        rule.clean += 1
        rule.past = (rule.past + ".")[-_PAST:]
        self._touched.add(number)

    def doubt(self) -> None:
        """Records were lost."""
        for incident in self.open.values():
            incident.doubted = True

    def begin_life(self) -> None:
        """The job was started again: steps count from 0, and none of them was evaluated yet."""
        for incident in (*self.open.values(), *self.over):
            for rule in incident.rules.values():
                rule.seen = None

    def settle(self, *, everything: bool = False) -> None:
        """A step is over: storms become one, what is believed is told, what has held for long enough is over."""
        self._join_storms()
        numbers = list(self.open) if everything else sorted(self._touched & self.open.keys())
        self._touched.clear()
        for number in numbers:
            incident = self.open[number]
            if not incident.rules:
                continue
            if incident.state is State.SUSPECTED:
                if believed(incident, self.policy):
                    incident.state = State.FIRING
                elif all_clean(incident, self.policy.confirm_n + min(incident.flaps, MAX_FLAPS)):
                    self._forget(incident)
            elif has_ended(incident, self.policy, self._time()):
                self.end(incident, f"its rules held in their last {count(clean_steps(incident, self.policy), 'evaluation')}")
            self.teller.tell(incident)

    # -- finding, opening, joining -------------------------------------------------------------------------------------

    def _incident_for(self, failure: Failure, found: set[int], ranks: int, coords: Coords) -> TrackedIncident:
        v = failure.violation
        if found:
            return self._merge([self.open[number] for number in sorted(found)])
        key = dedup_key(self.job, v.id, deviation(v, ranks, coords).scope)
        back = self._recent(lambda old: old.key == key or v.id in old.rules)
        if back is not None:
            return self._reopen(back)
        if len(self.open) >= self.policy.max_open:
            doubtful = next((i for i in self.open.values() if i.state is State.SUSPECTED), None)
            if doubtful is None:
                return min((i for i in self.open.values() if i.rules), key=lambda i: i.number, default=None) or self._open(key, failure)
            self._forget(doubtful)
        return self._open(key, failure)

    def _open(self, key: str, failure: Failure) -> TrackedIncident:
        v = failure.violation
        self.number += 1
        incident = TrackedIncident(
            key=key,
            state=State.SUSPECTED,
            title=title(v),
            severity=v.severity,
            tier=v.tier,
            code=v.code,
            first_step=v.step,
            began=self._wall(),
            number=self.number,
        )
        self._keep(incident)
        return incident

    def _join(self, incident: TrackedIncident, failure: Failure, ranks: int, coords: Coords) -> None:
        v, before = failure.violation, (incident.violations[:1], len(incident.rules))
        if v.id in incident.rules or len(incident.rules) < MAX_RULES:
            incident.rules.setdefault(v.id, Rule(step=v.step)).confirm = failure.confirm
            self._owner[v.id] = incident.number
        kept = incident.violations
        if len(kept) < MAX_KEPT or urgency(v, self._upstream) < urgency(kept[-1], self._upstream):
            incident.violations = foremost([slim(v), *(other for other in kept if other.id != v.id)], self._upstream)
        louder(incident, v.severity, v.tier)
        if incident.violations[0].id == v.id or not incident.ranks:
            how = deviation(v, ranks, coords)
            if how.words or not incident.ranks:
                incident.minority, incident.ranks, incident.axis = list(how.minority[:MAX_RANKS]), how.words, how.axis
        if before != (incident.violations[:1], len(incident.rules)):
            name_by_head(incident)

    def _keep(self, incident: TrackedIncident) -> None:
        self.open[incident.number] = incident
        self._owner |= dict.fromkeys(incident.rules, incident.number)
        self._belonging.restore(incident)

    def _leave(self, incident: TrackedIncident) -> None:
        del self.open[incident.number]
        for rule in incident.rules:
            if self._owner.get(rule) == incident.number:
                del self._owner[rule]
        self._belonging.remove(incident)

    # -- storms and merging --------------------------------------------------------------------------------------------

    def _began(self, step: int, rule: str) -> None:
        ids = self.begun.setdefault(step, [])
        if len(ids) <= self.policy.storm and rule not in ids:
            ids.append(rule)
        while len(self.begun) > _BEGUN_STEPS:
            del self.begun[next(iter(self.begun))]

    def _join_storms(self) -> None:
        for step, ids in self.begun.items():
            if len(ids) <= self.policy.storm:
                continue
            involved = [i for i in self.open.values() if any(_begin(rule) == step for rule in i.rules.values())]
            if involved:
                incident = self._merge(involved)
                incident.storm = True
                self._belonging.storm(incident, step)
                name_by_head(incident)
            ids.clear()

    def _merge(self, incidents: list[TrackedIncident]) -> TrackedIncident:
        """One incident of several: one that people know of goes on, the earliest of those."""
        into, *others = sorted(incidents, key=lambda i: (i.state is not State.FIRING, i.number))
        for other in others:
            self._belonging.merge(into, other)
            self._leave(other)
            for rule, state in other.rules.items():
                if len(into.rules) < MAX_RULES:
                    into.rules[rule] = state
                    self._owner[rule] = into.number
            into.violations = foremost([*into.violations, *other.violations], self._upstream)
            into.began = min(into.began, other.began)
            into.failed_at = max(into.failed_at, other.failed_at)
            into.storm = into.storm or other.storm
            into.doubted = into.doubted or other.doubted
            louder(into, other.severity, other.tier)
            if not into.ranks:
                into.minority, into.ranks, into.axis = other.minority, other.ranks, other.axis
            other.merged = into.key
            name_by_head(into)
            self._end(other, f"it is part of: {into.title}")
            self._touched.add(into.number)
        return into

    # -- ends and returns ----------------------------------------------------------------------------------------------

    def end(self, incident: TrackedIncident, why: str) -> None:
        """An incident is over."""
        self._leave(incident)
        self._end(incident, why)

    def _end(self, incident: TrackedIncident, why: str) -> None:
        known = incident.said is not None or not incident.merged
        incident.state, incident.why_ended = State.RESOLVED, why
        incident.ended, incident.ended_at = self._wall(), self._time()
        if known:
            self.over = [*self.over, incident][-MAX_OVER:]
        self.teller.tell(incident)

    def _forget(self, incident: TrackedIncident) -> None:
        """A suspicion was none; an incident that people knew before is over as it was."""
        self._leave(incident)
        if incident.flaps:
            incident.flaps -= 1
            incident.state = State.RESOLVED
            self.over = [*self.over, incident][-MAX_OVER:]

    def _recent(self, fits: Callable[[TrackedIncident], bool]) -> TrackedIncident | None:
        since = self._time() - self.policy.flap_window_s
        return next((i for i in reversed(self.over) if not i.merged and i.ended_at >= since and fits(i)), None)

    def _reopen(self, incident: TrackedIncident) -> TrackedIncident:
        self.over = [i for i in self.over if i is not incident]
        incident.state, incident.ended = State.SUSPECTED, None
        incident.flaps += 1
        self._keep(incident)
        return incident

    def age(self) -> None:
        """Let go of what is needed only to bring an incident back, once it cannot come back; tell what was held back."""
        since = self._time() - self.policy.flap_window_s
        for incident in self.over:
            if incident.ended_at < since:
                incident.rules, incident.keys = {}, {}
        for incident in list(self.open.values()):
            self.teller.tell(incident)

    # -- of the monitor itself -----------------------------------------------------------------------------------------

    def raise_own(self, code: str, text: str, severity: Severity, tier: Tier, facts: Mapping[str, str]) -> None:
        """Something is wrong with the monitoring: opens the incident of this code, or says more of it."""
        key = dedup_key(self.job, code, WORLD)
        incident = next((i for i in self.own() if i.code == code), None)
        if incident is None:
            incident = self._recent(lambda old: old.key == key)
            if incident is not None:
                self._reopen(incident)
            else:
                self.number += 1
                incident = TrackedIncident(
                    key=key,
                    state=State.FIRING,
                    title=text,
                    severity=severity,
                    tier=tier,
                    code=code,
                    began=self._wall(),
                    number=self.number,
                )
                self._keep(incident)
            incident.state = State.FIRING
        incident.title, incident.facts, incident.failed_at = text, dict(facts), self._time()
        louder(incident, severity, tier)
        self.teller.tell(incident)

    def clear_own(self, code: str, why: str) -> None:
        """It is well again; nothing when it never was otherwise."""
        incident = next((i for i in self.own() if i.code == code), None)
        if incident is not None:
            self.end(incident, why)

    def own(self) -> Iterator[TrackedIncident]:
        """Open incidents about the monitoring."""
        return (i for i in list(self.open.values()) if not i.rules)


def _begin(rule: Rule) -> int:
    return -1 if rule.step is None else rule.step
