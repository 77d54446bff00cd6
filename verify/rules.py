"""Rules of several packs as one list: a rule that two packs hold is judged once, with the support of both.

`checker` and the live checker ask before they judge; `proctor explain` asks for one rule. In: packs, in the order in which they
were named. Out: rules, as loud as the louder copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from proctor.invariants.invariant import FalseAlarm, Invariant, Record, Support, union
from proctor.invariants.pack import Pack

T = TypeVar("T", FalseAlarm, Record)


def merge_rules(packs: Iterable[Pack]) -> list[Invariant]:
    """Rules of several packs, each id once, with the support of all of them."""
    every = list(packs)
    programs = {source.id: source.program for pack in every for source in pack.provenance.sources}
    best: dict[str, Invariant] = {}
    for pack in every:
        for rule in pack.invariants:
            held = best.get(rule.id)
            best[rule.id] = rule if held is None else _joined(held, rule, programs)
    return list(best.values())


def _joined(a: Invariant, b: Invariant, programs: Mapping[str, str]) -> Invariant:
    """One rule of two packs. It is as loud as the louder copy says: a habit of programs at large may be a law of this one."""
    best, other = sorted((a, b), key=lambda r: (r.support.programs, r.support.passed), reverse=True)
    runs = {run.run: run for rule in (other, best) for run in rule.evidence.runs}
    counted = Support(
        passed=sum(run.passed for run in runs.values()),
        excluded=sum(run.excluded for run in runs.values()),
        runs=sum(run.passed > 0 for run in runs.values()),
        programs=len({programs[run] for run in runs if run in programs}),
    )
    support = Support(*(max(getattr(s, f) for s in (a.support, b.support, counted)) for f in Support.__struct_fields__))
    return msgspec.structs.replace(
        best,
        support=support,
        severity=max(a.severity, b.severity, key=lambda s: s.level),
        false_alarm=_more(best.false_alarm, other.false_alarm),
        record=_more(best.record, other.record),
        definitions=union([a.definitions, b.definitions]),
    )


def _more(one: T | None, other: T | None) -> T | None:
    """Of two measurements the one that speaks against the rule, else the longer one."""
    both = [m for m in (one, other) if m is not None]
    return max(both, key=lambda m: (m.failed > 0, m.tested), default=None)
