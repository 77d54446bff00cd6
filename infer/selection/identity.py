"""Which of the user's functions and classes a rule speaks of, and what they were in the programs that it was learned from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from proctor.infer.shards import Summary
from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Definition, Hypothesis, Invariant, union

_NAME: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def identified(rules: Sequence[Invariant], runs: Mapping[str, Summary]) -> list[Invariant]:
    """Rules with the definitions of what they name, as the runs that support them have it.

    Args:
        rules: with their evidence.
        runs: by id.
    """
    return [msgspec.structs.replace(rule, definitions=_defined(rule, runs)) for rule in rules]


def _defined(rule: Invariant, runs: Mapping[str, Summary]) -> tuple[Definition, ...]:
    names = set(_names(rule.hypothesis, rule.precondition))
    told = [runs[held.run].definitions for held in rule.evidence.runs if held.run in runs and held.passed]
    found: list[tuple[Definition, ...]] = []
    for here in told:
        owners = {owner for name in names if (owner := next((part for part in _parts(name) if part in here), ""))}
        found.append(tuple(Definition(owner, (here[owner],)) for owner in sorted(owners)))
    return union(found)


def _names(hypothesis: Hypothesis, precondition: Precondition) -> Iterator[str]:
    said = [value for _, value in hypothesis.params] + [c.value for clause in precondition.any_of for c in clause]
    for text in said:
        if isinstance(text, str):
            yield from _NAME.findall(text)


def _parts(name: str) -> Iterator[str]:
    """`a.b.C.f` → `a.b`, `a.b.C`, `a.b.C.f`: a class says more of a method than the method does."""
    yield from list(accumulate(name.split("."), lambda left, right: f"{left}.{right}"))[1:]
