"""Hypotheses, invariants and what supports them: pure data, no behaviour of a relation."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from proctor.invariants.condition import Precondition

Param = str | int | float | bool | None


class Severity(StrEnum):
    """How loudly a violation is reported. Ordered: info < warning < error < critical."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def level(self) -> int:
        return list(Severity).index(self)


class Hypothesis(msgspec.Struct, frozen=True):
    """A relation on concrete descriptors, seen to hold at least once.

    Args:
        relation: name of the relation, the key of its registry entry.
        params: the descriptors, sorted pairs so that equal hypotheses compare and hash equal.
    """

    relation: str
    params: tuple[tuple[str, Param], ...]

    @classmethod
    def of(cls, relation: str, **params: Param) -> Hypothesis:
        return cls(relation, tuple(sorted(params.items())))

    def __getitem__(self, key: str) -> Param:
        for name, value in self.params:
            if name == key:
                return value
        raise KeyError(key)

    def get(self, key: str, default: Param = None) -> Param:
        return next((v for k, v in self.params if k == key), default)

    def text(self, key: str) -> str:
        """A parameter that is text; `""` when absent."""
        value = self.get(key)
        return "" if value is None else str(value)


class Support(msgspec.Struct, frozen=True):
    """How much evidence a rule has: examples that passed, and in how many runs, programs and steps."""

    passed: int
    excluded: int  # failing examples that the precondition excludes
    runs: int
    programs: int


class Invariant(msgspec.Struct, frozen=True):
    """A rule: hypothesis, when it applies, and how well supported it is."""

    id: str
    hypothesis: Hypothesis
    precondition: Precondition
    support: Support
    text: str  # the rule in one English sentence
    severity: Severity = Severity.ERROR

    @property
    def relation(self) -> str:
        return self.hypothesis.relation


def invariant_id(hypothesis: Hypothesis, precondition: Precondition) -> str:
    """Stable identifier: a hash of what the rule says, so that equal rules of two packs are one."""
    blob = msgspec.json.encode((hypothesis, precondition))
    return hashlib.sha256(blob).hexdigest()[:12]
