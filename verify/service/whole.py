"""The recorded run, checked once more as a whole when the job is over.

`verifier` calls it last. In: the run directory and the rules of the job. Out: what `proctor check` would say of the run, or
nothing and a sentence why. Windows hold what a step needs; rules that compare far-off steps see more here, and what failed
live and holds here was a mistake of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import ProctorError
from proctor.invariants.invariant import Severity, Tier
from proctor.invariants.pack import Pack
from proctor.invariants.suppression import Suppression
from proctor.invariants.trace import Run, Trace
from proctor.invariants.verdict import TAKEN_BACK, CheckResult, Violation
from proctor.verify.checker import Judged, check
from proctor.verify.coverage import coverage

MAX_WHOLE_BYTES: Final = 256 * 1024 * 1024  # of a recorded run that is checked as a whole at the end
_SHORT_BYTES: Final = 16 * 1024 * 1024  # of one that takes seconds


@dataclass
class Summary:
    """What the verifier saw of a job, for its report and exit code."""

    violations: list[Violation] = field(default_factory=list)
    judged: int = -1
    lost: Mapping[str, int] = field(default_factory=dict)
    result: CheckResult | None = None
    live: CheckResult | None = None  # where the run was not checked as a whole
    trace: Trace | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the run was checked as a whole, and lacks nothing."""
        if self.result is None or self.trace is None:
            return False
        seen = coverage(self.trace)
        return seen.complete and not seen.dropped

    def worst(self) -> Severity | None:
        return max((v.severity for v in self.violations), key=lambda s: s.level, default=None)


@dataclass(frozen=True)
class Judgement:
    """The whole run as one judgement of the incident book: the steps `first` to `end`, and what was judged of them."""

    first: int
    end: int
    judged: Sequence[Judged]


@dataclass(frozen=True)
class Whole:
    """A run that was checked."""

    trace: Trace
    info: Mapping[str, Any]
    result: CheckResult

    def judgement(self, late: Iterable[Violation], packs: Iterable[Pack]) -> Judgement:
        """These violations as one last judgement."""
        rules = {rule.id: rule for pack in packs for rule in pack.invariants}
        return Judgement(-1, self.trace.steps, [Judged(rules[v.id], v.count, v.count, 0, v) for v in late if v.id in rules])


def is_short(folder: Path) -> bool:
    """Whether the recorded run is checked as a whole so soon that its last steps need not be judged before."""
    return 0 < _size(folder) <= _SHORT_BYTES


def check_whole(
    folder: Path, packs: Sequence[Pack], suppressions: Sequence[Suppression], *, lives: int, say: Callable[[str], None]
) -> Whole | None:
    """Check the recorded run; `None`, and a sentence where there is something to say: it cannot be, or is too long.

    Args:
        folder: of the run.
        packs: rules of the job.
        suppressions: besides those of the packs.
        lives: how often the job was started.
        say: takes the sentence.
    """
    size = _size(folder)
    if not 0 < size <= MAX_WHOLE_BYTES:
        if size:
            say(f"the run is too long to be checked as a whole here  →  proctor check {folder}")
        return None
    try:
        run = Run(folder)
        trace = run.trace
        if max(Counter((p.run, p.rank) for p in trace.processes if p.world > 1).values(), default=0) > 1:
            say(f"the job was started {lives} times: each was judged as it went on, and the run not as a whole")
            return None
        return Whole(trace, run.info, check(trace, packs, suppressions=suppressions))
    except (ProctorError, OSError) as e:
        say(f"the recorded run could not be checked as a whole: {e}")
        return None


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("procs/*/*.arrow")) if folder.is_dir() else 0


def taken_back(result: CheckResult, live: Mapping[str, Violation], say: Callable[[str], None]) -> dict[str, Violation]:
    """Violations that were found live and hold in the whole run: they come back as warnings, and `result` notes each."""
    back: dict[str, Violation] = {}
    for violation in live.values():
        if violation.id in result.held:
            quieter = min(violation.severity, Severity.WARNING, key=lambda s: s.level)
            advice = f"{TAKEN_BACK}. {violation.advice}"
            back[violation.id] = msgspec.structs.replace(violation, severity=quieter, tier=Tier.TICKET, advice=advice)
            text = f"rule {violation.id} ({violation.text}): {TAKEN_BACK}"
            result.notes.append(text)
            say(text)
    return back
