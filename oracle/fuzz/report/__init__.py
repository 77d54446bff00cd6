"""Reports of a campaign, one file a format: terminal, JSON, HTML. All of them read the same `Summary`."""

from __future__ import annotations

from collections import Counter

import msgspec

from proctor.oracle.fuzz.axes import axes_for
from proctor.oracle.fuzz.search.campaign import Pair
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions.journal import Asked


class Summary(msgspec.Struct, frozen=True):
    """A campaign in numbers.

    Attributes:
        asked: of it.
        findings: one a signature; new and confirmed ones first.
        pairs, settings: that ran.
        passed: settings that were left out because a finding explains them.
        verdicts: verdict → settings.
        matrix: axis → value → verdict → settings.
        reasons: of what was refused, different by design or no program → settings.
        rounding: what differs by no more than the program's own rounding makes, each with its numbers and its setting.
        seconds: that settings took, without attribution and shrinking.
    """

    asked: Asked
    findings: tuple[Finding, ...]
    pairs: int
    settings: int
    passed: int
    verdicts: dict[str, int]
    matrix: dict[str, dict[str, dict[str, int]]]
    reasons: dict[str, int]
    rounding: tuple[str, ...]
    seconds: float

    @property
    def new(self) -> list[Finding]:
        """Findings that are confirmed and not known."""
        return [f for f in self.findings if not f.known and f.confirmed == "yes"]


def summary(asked: Asked, findings: list[Finding], pairs: list[Pair]) -> Summary:
    """Count."""
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    rounding: list[str] = []
    matrix: dict[str, dict[str, Counter[str]]] = {a.name: {} for a in axes_for(asked.libraries)}
    for pair in pairs:
        for row in pair.rows:
            verdicts[row.verdict] += 1
            if row.verdict in ("refused", "different", "no program"):
                reasons[f"{row.verdict}: {row.why[:140]}"] += 1
            if row.verdict == "rounding":
                rounding.append(f"{row.why} ({pair.scenario.template}; {', '.join(f'{k}={v}' for k, v in row.setting.items())})")
            for name, values in matrix.items():
                value = row.setting.get(name)
                if value is not None:
                    values.setdefault(str(value), Counter())[row.verdict] += 1
    plain = {name: {v: dict(c) for v, c in sorted(values.items())} for name, values in matrix.items() if values}
    return Summary(
        asked, tuple(findings), len(pairs), sum(len(p.rows) for p in pairs), sum(p.passed for p in pairs), dict(verdicts.most_common()), plain,
        dict(reasons.most_common(60)), tuple(rounding), sum(p.seconds for p in pairs),
    )
