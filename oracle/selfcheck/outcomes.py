"""What is said of a relation, and of a program as a whole. Data; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

Word = Literal["equivalent", "different", "by-design", "not-applicable", "inconclusive"]

SCHEMA: Final = 1
EXIT_CODES: Final[dict[str, int]] = {"equivalent": 0, "different": 1, "inconclusive": 3}


class Culprit(msgspec.Struct, frozen=True):
    """Where a program parts from itself.

    Attributes:
        module: its path in the model; "" is the model itself, or nothing that belongs to a module.
        cls: its class.
        source: `file:line` of the program.
        op: operation of torch at which values part, "" where it is not known.
    """

    module: str = ""
    cls: str = ""
    source: str = ""
    op: str = ""

    def __str__(self) -> str:
        named = f"{self.module} ({self.cls})" if self.module and self.cls else self.module or self.cls
        return ", ".join(part for part in (named, self.op, self.source) if part)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One relation on one subject.

    Attributes:
        relation, claim: which one, and what it says.
        subject: the model, the optimizer or the program.
        verdict: `different` fails; `by-design` differs for a declared reason; `not-applicable` and `inconclusive` say why in `reason`.
        reason: one sentence.
        expected, seen: of what differs.
        culprit: where it begins.
        error: relative to the size of what is compared; of no meaning unless something was compared.
        tolerance: likewise, by the noise of rounding.
        advice: what to look at next.
        seconds: the check took.
        step: update, counted from 0.
        rank: of the process.
    """

    relation: str
    claim: str = ""
    subject: str = ""
    verdict: Word
    reason: str = ""
    expected: str = ""
    seen: str = ""
    culprit: Culprit | None = None
    error: float = 0.0
    tolerance: float = 0.0
    advice: str = ""
    seconds: float = 0.0
    step: int = 0
    rank: int = 0


class SelfReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is said of a program.

    Attributes:
        verdict: `different` if any relation is, else `equivalent` if any was checked, else `inconclusive`.
        reason: one sentence.
        outcomes: what failed first, what was not checked last.
        command: the program's.
        notes: of the run.
        step_s: what one step of the program took, between two updates.
        models_s: what all relations of models took together.
    """

    schema: int = SCHEMA
    verdict: Literal["equivalent", "different", "inconclusive"]
    reason: str
    outcomes: tuple[Outcome, ...]
    command: str = ""
    notes: tuple[str, ...] = ()
    step_s: float = 0.0
    models_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """0, 1 or 3."""
        return EXIT_CODES[self.verdict]


_ORDER: Final = {"different": 0, "by-design": 1, "equivalent": 2, "inconclusive": 3, "not-applicable": 4}


def conclude(
    outcomes: Iterable[Outcome], *, command: str = "", notes: Sequence[str] = (), step_s: float = 0.0, models_s: float = 0.0
) -> SelfReport:
    """Put outcomes together; of one relation with one culprit on several subjects the first is kept."""
    kept: dict[tuple[object, ...], Outcome] = {}
    for outcome in outcomes:
        same = (outcome.relation, outcome.verdict, outcome.culprit or outcome.subject, "" if outcome.culprit else outcome.reason)
        kept.setdefault(same, outcome)
    ordered = sorted(kept.values(), key=lambda o: (_ORDER[o.verdict], o.relation))
    failed = [o for o in ordered if o.verdict == "different"]
    held = [o for o in ordered if o.verdict in ("equivalent", "by-design")]
    if failed:
        names = sorted({o.relation for o in failed})
        reason = f"{len(names)} relation{'s' if len(names) != 1 else ''} broken: {', '.join(names)}"
    elif held:
        reason = f"{len({o.relation for o in held})} relations checked, none broken"
    else:
        reason = "no relation could be checked"
    return SelfReport(
        verdict="different" if failed else "equivalent" if held else "inconclusive", reason=reason, outcomes=tuple(ordered), command=command, notes=tuple(notes), step_s=step_s, models_s=models_s
    )
