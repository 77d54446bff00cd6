"""Violations and incidents: what a check says."""

from __future__ import annotations

import msgspec

from proctor.invariants.invariant import Example, FalseAlarm, Severity, Support, Tier


class Evidence(msgspec.Struct, frozen=True):
    """One record behind a violation, as a reader wants to see it."""

    step: int | None
    rank: int | None
    what: str
    source: str = ""


class Cause(msgspec.Struct, frozen=True):
    """The call that is most likely to blame, and why; only what the records show."""

    text: str  # the reason in one sentence
    function: str  # of the user's, where one is known; else the one that was called
    source: str = ""  # file:line in the user's code


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that failed, first failing place first. The fields are those of the CLI contract."""

    id: str  # invariant id
    code: str  # rule code of the relation, PR1xx
    relation: str
    severity: Severity
    text: str  # the rule in one English sentence
    when: str  # its precondition in English
    step: int | None
    rank: int | None
    function: str
    variable: str
    module: str
    source: str  # file:line in the user's code
    expected: str
    seen: str
    support: Support
    confirmed: bool
    advice: str  # what to look at next
    count: int = 1  # failing examples of this rule in the run
    places: list[tuple[int | None, int | None]] = []  # (step, rank) of each failing example, bounded
    evidence: list[Evidence] = []
    tier: Tier = Tier.TICKET
    false_alarm: FalseAlarm | None = None  # of the rule, where it was measured
    held: tuple[Example, ...] = ()  # where the rule held when it was learned
    sides: tuple[tuple[int, ...], ...] = ()  # ranks that were compared, those that agree together, the fewest first
    cause: Cause | None = None  # why ranks part, where the records show it


# Of a rule whose verdicts disagree.
TAKEN_BACK = "it failed while the run went on and holds in the run as a whole, a mistake of Proctor's"


class Silenced(msgspec.Struct, frozen=True):
    """A violation that was found and is not reported, and why."""

    violation: Violation
    why: str  # suppressed, known
    reason: str
    until: str = ""  # last day, YYYY-MM-DD
    by: str = ""


class Incident(msgspec.Struct, frozen=True):
    """Violations of one cause; the most upstream first."""

    title: str
    first_step: int | None
    violations: list[Violation]


class CheckResult(msgspec.Struct, frozen=True):
    """Everything that `proctor check` found, and everything that it could not look at."""

    run: str
    incidents: list[Incident]
    checked: int  # rules with at least one example that met the precondition
    not_triggered: int  # rules whose precondition was never met
    unknown: int  # rules that could not be decided
    notes: list[str]  # what was not checked, one sentence each
    steps: int
    ranks: int
    silenced: list[Silenced] = []
    held: frozenset[str] = frozenset()  # ids of rules that applied and held, with nothing undecided

    @property
    def violations(self) -> list[Violation]:
        return [v for incident in self.incidents for v in incident.violations]
