"""Verdicts for tests of what follows from them: violations, judged rules, rounds, and a book with a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.relations import Happens
from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Support
from proctor.invariants.relations import Confirm, Relation
from proctor.invariants.verdict import Violation
from proctor.verify.checker import Judged
from proctor.verify.lifecycle import IncidentBook, Policy
from proctor.verify.notice import Notice


def relation(name: str, code: str, upstream: int, confirm: Confirm = "at once", ahead: int = 0, *, once: bool = False) -> Relation:
    told_once = lambda self, hypothesis: once  # noqa: E731
    kind = type(name, (Happens,), {"name": name, "code": code, "upstream": upstream, "confirm": confirm, "ahead": ahead, "told_once": told_once})
    made: Relation = kind()
    return made


RELATIONS: Mapping[str, Relation] = {
    "sure": relation("sure", "PR191", 3),
    "near": relation("near", "PR192", 1),
    "late": relation("late", "PR193", 5, ahead=1),
    "chance": relation("chance", "PR194", 4, "repeat"),
    "once": relation("once", "PR195", 4, once=True),
}


def violation(rule: str, step: int | None = 0, family: str = "sure", **more: Any) -> Violation:
    """A violation of one rule, on rank 0 of which nobody knows a function or a variable, unless said."""
    plain = {
        "id": rule,
        "code": RELATIONS[family].code,
        "relation": family,
        "severity": Severity.ERROR,
        "text": f"rule {rule} holds",
        "when": "always",
        "step": step,
        "rank": 0,
        "function": "",
        "variable": "",
        "module": "",
        "source": "train.py:7",
        "expected": "a",
        "seen": f"{rule} broke",
        "support": Support(10, 0, 1, 1),
        "confirmed": True,
        "advice": "Look at it.",
        "count": 1,
        "places": [(step, 0)],
    }
    return Violation(**(plain | more))


def failed(v: Violation, met: int = 1, undecided: int = 0) -> Judged:
    """A rule that failed at every place of its violation."""
    steps = {s for s, _ in v.places}
    return Judged(_rule(v.id, v.relation), met=max(met, len(steps)), failed=len(steps), undecided=undecided, violation=v)


def held(rule: str, met: int = 1, undecided: int = 0, family: str = "sure") -> Judged:
    return Judged(_rule(rule, family), met=met, failed=0, undecided=undecided)


def _rule(rule: str, family: str) -> Invariant:
    return Invariant(rule, Hypothesis.of(family, rule=rule), ALWAYS, Support(10, 0, 1, 1), f"rule {rule} holds")


@dataclass(frozen=True)
class Steps:
    """What is said of some steps."""

    first: int
    end: int
    judged: Sequence[Judged]


@dataclass
class Book:
    """An incident book whose clocks stand still until they are told to go on."""

    policy: Policy = field(default_factory=lambda: Policy(hold_s=0.0))
    path: Path | None = None
    ranks: int = 1
    coords: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    time: float = 1_000.0
    told: list[Notice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = self._open()

    def _open(self) -> IncidentBook:
        return IncidentBook(
            "job", "host", self.policy, now=lambda: 1e9 + self.time, clock=lambda: self.time, state_path=self.path,
            relations=RELATIONS,
        )  # fmt: skip

    def step(self, step: int, *judged: Judged, **more: Any) -> list[Notice]:
        return self.steps(Steps(step, step + 1, judged), **more)

    def steps(self, *rounds: Steps, **more: Any) -> list[Notice]:
        return self._note(self.book.judged(rounds, **{"ranks": self.ranks, "coords": self.coords} | more))

    def tick(self, seconds: float = 1.0, heard: Mapping[int, float] | None = None) -> list[Notice]:
        self.time += seconds
        return self._note(self.book.tick(heard))

    def kill(self, away: float = 0.0) -> None:
        """The verifier is killed as it stands, and started again."""
        self.time += away
        self.book = self._open()

    def _note(self, notices: list[Notice]) -> list[Notice]:
        self.told += notices
        return notices

    @property
    def actions(self) -> list[str]:
        return [n.action.value for n in self.told]

    @property
    def states(self) -> dict[str, str]:
        """State of each incident by the rule that it began with."""
        return {i.key.split(":")[-2]: i.state.value for i in self.book.incidents}
