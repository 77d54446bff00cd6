"""An incident as it is kept: what is shown of it, and what is needed to carry on with it after a restart.

All of it is bounded, whatever is found: rules, names and texts beyond a number are counted and not kept.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from proctor.invariants.invariant import Severity, Tier
from proctor.invariants.relations import Confirm
from proctor.invariants.verdict import Cause, Violation
from proctor.verify.wording import clean

MAX_RULES: Final = 500  # followed one by one, of one incident
MAX_KEPT: Final = 20  # violations of one incident, the most upstream ones
MAX_KEYS: Final = 1000  # variables, functions, modules by which others are found to belong to it
MAX_RANKS: Final = 256  # ranks listed one by one
_TEXT: Final = 600
_NAME: Final = 300
_PLACES: Final = 32
_EVIDENCE: Final = 2


class State(StrEnum):
    """Where in its life an incident is."""

    SUSPECTED = "suspected"  # seen, not believed yet: nobody was told
    FIRING = "firing"
    RESOLVED = "resolved"


class Rule(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rule said since it joined an incident.

    Args:
        confirm: whether it is believed at once.
        step: at which it failed first; `None` for the whole run.
        last: step at which it failed last.
        fails: failing examples.
        clean: evaluations without a failure since the last one.
        seen: the last step of the job's present life that was evaluated.
        wide: most examples that it was decided on in a step in which it failed.
        past: its last evaluations, `x` failed and `.` clean, the latest at the end.
    """

    confirm: Confirm = "at once"
    step: int | None = None
    last: int | None = None
    fails: int = 0
    clean: int = 0
    seen: int | None = None
    wide: int = 0
    past: str = ""


class TrackedIncident(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One cause, followed while the job runs.

    Args:
        key: dedup key; fixed from its first moment on.
        state: where in its life it is.
        title: the cause in one line.
        severity, tier: the loudest of its rules.
        code: of the violation that it begins with.
        first_step: at which it began.
        began: epoch seconds at which it began.
        ended: epoch seconds at which it was over.
        why_ended: in words.
        violations: the most upstream first, `MAX_KEPT` of them.
        beside: rules that failed, too, and are not in `violations`.
        minority: ranks that are unlike the others, at most `MAX_RANKS`.
        ranks: the same in words: `3 of 64: 17, 18, 40`.
        axis: mesh axis along which ranks differ, where known.
        flaps: times that it came back.
        storm: so many rules began to fail at once that they were taken for one cause.
        capsule: where the steps around it are kept.
        not_kept: why they are not, where that is known.
        merged: key of the incident that it turned out to be part of.
        said: what was told people last, severity and tier; nothing when they think it is over.
        told_at: seconds on the book's time line at which they were told that it came back, in the last hour.
        number: place in the order of opening.
        rules: by id, those that are followed.
        keys: by what it touches, the first and last step at which a rule touching it began to fail.
        failed_at, ended_at: on the book's time line, in seconds.
        doubted: records were lost since it began, or its verifier was started again: steps that show less than those in which it failed say
            nothing of it.
        facts: of an incident about the monitor itself, what is shown of it.
    """

    key: str
    state: State
    title: str
    severity: Severity
    tier: Tier
    code: str
    first_step: int | None = None
    began: float
    ended: float | None = None
    why_ended: str = ""
    violations: list[Violation] = []
    beside: int = 0
    minority: list[int] = []
    ranks: str = ""
    axis: str = ""
    flaps: int = 0
    storm: bool = False
    capsule: str = ""
    not_kept: str = ""
    merged: str = ""
    said: tuple[Severity, Tier] | None = None
    told_at: list[float] = []
    number: int
    rules: dict[str, Rule] = {}
    keys: dict[str, tuple[int, int]] = {}
    failed_at: float = 0.0
    ended_at: float = 0.0
    doubted: bool = False
    facts: dict[str, str] = {}

    @property
    def open(self) -> bool:
        return self.state is not State.RESOLVED


def slim(v: Violation) -> Violation:
    """A violation of bounded size: some places and evidence, texts cut in the middle."""
    return msgspec.structs.replace(
        v,
        text=clean(v.text, _TEXT),
        when=clean(v.when, _TEXT),
        function=clean(v.function, _NAME),
        variable=clean(v.variable, _NAME),
        module=clean(v.module, _NAME),
        source=clean(v.source, _NAME),
        expected=clean(v.expected, _TEXT),
        seen=clean(v.seen, _TEXT),
        advice=clean(v.advice, _TEXT),
        places=v.places[:_PLACES],
        evidence=[msgspec.structs.replace(e, what=clean(e.what, _TEXT), source=clean(e.source, _NAME)) for e in v.evidence[:_EVIDENCE]],
        held=(),
        sides=(),
        cause=v.cause and Cause(clean(v.cause.text, _TEXT), clean(v.cause.function, _NAME), clean(v.cause.source, _NAME)),
    )
