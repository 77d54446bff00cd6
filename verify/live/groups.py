"""Rules that the live checker judges together, what a round says of some steps, and what all rounds so far say of a rule.

`online.py` makes a `Group` of the rules of each relation that read the same, judges groups in `Round`s, and adds what they say to a `Tally` a rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from proctor.invariants.invariant import Invariant
from proctor.invariants.relations import Reads, Relation
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.checker import MAX_PLACES, Judged

QUICK: Final = ("calls", "records")  # rules that read these are judged first
MEMOS: Final = 512  # windows found healthy that are remembered, per relation,
VERDICTS: Final = 64  # and what was said of them


@dataclass(frozen=True)
class Round:
    """What one relation says of some steps.

    first, end: the steps, `end` not included; -1 is what came before training.
    judged: of each rule that applied.
    source: gives `trace`, the window that it was judged in; holds until the next round.
    """

    relation: str
    first: int
    end: int
    judged: Sequence[Judged]
    source: Callable[[], Trace]

    @property
    def trace(self) -> Trace:
        return self.source()

    @property
    def violations(self) -> list[Violation]:
        return [j.violation for j in self.judged if j.violation is not None]


@dataclass
class Tally:
    """What the rounds so far say of one rule."""

    met: int = 0
    failed: int = 0
    undecided: int = 0
    blind: bool = False
    violation: Violation | None = None

    def add(self, judged: Judged) -> None:
        self.met += judged.met
        self.failed += judged.failed
        self.undecided += judged.undecided
        self.blind |= judged.blind
        if judged.violation is None:
            return
        held, self.violation = self.violation, judged.violation
        if held is not None:
            places = [*held.places, *judged.violation.places][:MAX_PLACES]
            count = held.count + judged.violation.count
            self.violation = msgspec.structs.replace(held, count=count, places=places, confirmed=len(set(places)) > 1)


@dataclass
class Group:
    """Rules of a relation that are judged together."""

    relation: Relation
    reads: Reads
    rules: Sequence[Invariant]
    measures: frozenset[str] = field(init=False)  # functions whose numbers some of the rules read
    cost: float = 0.0  # seconds, a running mean
    done: int = -1  # the last step that was over when they were judged
    healthy: OrderedDict[tuple[Any, ...], Sequence[Judged]] = field(default_factory=OrderedDict)
    verdicts: dict[tuple[Any, ...], Sequence[Judged]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measures = frozenset[str]().union(*(self.relation.measures(rule.hypothesis) for rule in self.rules))

    def remember(self, window: tuple[Any, ...], judged: Sequence[Judged]) -> None:
        """A window was found healthy; of those that are said the same of, what is said is kept once."""
        if len(self.verdicts) >= VERDICTS:
            self.verdicts.clear()
        said = tuple((one.rule.id, one.met, one.undecided, one.blind) for one in judged)
        self.healthy[window] = self.verdicts.setdefault(said, judged)
        if len(self.healthy) > MEMOS:
            self.healthy.popitem(last=False)


def is_urgent(these: Group) -> bool:
    """Contradictions between ranks, which the end of a step shows."""
    return these.relation.ahead == 0 and these.reads in QUICK and not these.relation.alone
