"""Which violations is nobody to hear of? Those that are suppressed, and those that an earlier check knew.

They are taken out before incidents are made and exit codes are chosen, and kept beside them with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import date

from proctor.invariants.suppression import Known, Suppression
from proctor.invariants.verdict import Silenced, Violation


def silence(
    violations: Iterable[Violation],
    programs: AbstractSet[str],
    suppressions: Sequence[Suppression] = (),
    baseline: AbstractSet[Known] = frozenset(),
    today: date | None = None,
) -> tuple[list[Violation], list[Silenced]]:
    """Part violations into those to report and those not to.

    Args:
        violations: what was found.
        programs: of the run.
        suppressions: those that have ended by `today` do nothing.
        baseline: what an earlier check found.
        today: for tests; the present day when absent.
    """
    day = date.today() if today is None else today
    running = [s for s in suppressions if not s.expired(day)]
    familiar = {_key(k) for k in baseline} | {_text_key(k) for k in baseline}
    heard: list[Violation] = []
    silenced: list[Silenced] = []
    for violation in violations:
        ruling = next((s for s in running if s.covers(violation.id, programs)), None)
        now = known(violation, programs)
        if ruling is not None:
            silenced.append(Silenced(violation, "suppressed", ruling.reason, ruling.until, ruling.by))
        elif _key(now) in familiar or _text_key(now) in familiar:
            silenced.append(Silenced(violation, "known", "in the baseline"))
        else:
            heard.append(violation)
    return heard, silenced


def known(violation: Violation, programs: AbstractSet[str]) -> Known:
    """A violation as a baseline remembers it."""
    program = ", ".join(sorted(programs))
    return Known(violation.id, program, violation.text, violation.function, violation.variable)


def expired(suppressions: Iterable[Suppression], programs: AbstractSet[str], today: date | None = None) -> list[str]:
    """One sentence for each suppression of these programs that has ended."""
    day = date.today() if today is None else today
    return [
        f"the suppression of rule {s.rule} ({s.reason}) ended on {s.until}"
        for s in sorted(set(suppressions))
        if s.expired(day) and s.covers(s.rule, programs)
    ]


def _key(k: Known) -> tuple[str, ...]:
    return k.rule, k.program, k.function, k.variable


def _text_key(k: Known) -> tuple[str, ...]:
    """The same claim of a pack that was learned again, when its precondition, hence its id, may be another."""
    return "", k.program, k.text, k.function, k.variable
