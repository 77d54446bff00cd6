"""What is sent to people: a notice that an incident began, or that it is over. Sinks turn it into their own payload."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from proctor.invariants.invariant import Severity, Tier


class Action(StrEnum):
    TRIGGER = "trigger"
    ACKNOWLEDGE = "acknowledge"  # `page test` only: people acknowledge, we do not
    RESOLVE = "resolve"


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One incident at one moment, as plain data: no environment, no arguments, no tensor values, no secrets.

    Args:
        action: it begins or changes (`trigger`), or it is over (`resolve`).
        key: dedup key, equal for all notices of an incident, over restarts: `proctor:<job>:<rule>:<scope>`.
        tier: whether it deserves to wake somebody.
        severity: of the worst violation in it.
        title: the cause in one line.
        text: claim, evidence and next steps; plain text of some lines.
        job: which job.
        source: where it runs, `job@host`.
        code: rule code of the violation that it begins with, `PR101`; `PR2xx` for what the monitor says of itself.
        component: path of the module, "" when none is known.
        group: mesh axis or ranks that it is about.
        step: where it began.
        began: epoch seconds at which it began: equal in all notices of it.
        at: epoch seconds of this notice.
        details: more to show, in order: expected, seen, ranks, source, support, capsule, next command.
        links: what to open, by name.
        test: sent by `proctor page test`.
    """

    action: Action
    key: str
    tier: Tier
    severity: Severity
    title: str
    text: str = ""
    job: str = ""
    source: str = ""
    code: str = ""
    component: str = ""
    group: str = ""
    step: int | None = None
    began: float
    at: float
    details: dict[str, str] = {}
    links: dict[str, str] = {}
    test: bool = False
