"""Hypotheses, invariants and what supports them: pure data, no behaviour of a relation.

Everything that speaks of rules reads this, in ranks' verifiers and in files: relations propose a `Hypothesis`, `infer` makes an `Invariant` of it with
its condition and its support, a pack keeps it, `check` judges it. For example `Hypothesis.of("progress", mode="between")`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
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


class Example(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """One record on which a hypothesis passed or failed, as a reader wants to see it. Texts are bounded.

    Ordered: of several examples the earliest are kept, so that which ones a merged pack shows does not depend on
    the order of merging.
    """

    step: int  # -1: before the first
    rank: int
    program: str
    run: str  # `Source.id`
    where: str = ""  # function or variable
    source: str = ""  # file:line in the user's code
    seen: str = ""  # "" of a passing example: what was expected
    expected: str = ""
    fields: tuple[tuple[str, str], ...] = ()  # what was set of the fields that the rule speaks of, sorted


class RunSupport(msgspec.Struct, frozen=True, order=True):
    """What one run says of a rule."""

    run: str  # `Source.id`
    passed: int  # passing examples that meet the precondition
    excluded: int = 0  # failing examples, all outside of it


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a rule is believed: a few examples of either kind, and every run that supports it."""

    passing: tuple[Example, ...] = ()
    failing: tuple[Example, ...] = ()  # outside the precondition
    runs: tuple[RunSupport, ...] = ()  # by id


class Diversity(msgspec.Struct, frozen=True, omit_defaults=True):
    """How different the programs are that support a rule."""

    programs: int = 0
    families: int = 0  # `Trace.families`


ANY_FAMILY = ("*",)


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one pack said of a hypothesis, kept when packs are merged so that any order of merging gives one result.

    precondition: in the pack; without a clause where its runs refute the hypothesis.
    families: `Source.families` of the pack; `ANY_FAMILY` where they are not known.
    failing: its runs have failing examples, all outside of the precondition.
    support: as the pack had it; larger than what `runs` add up to where it does not name its runs.
    runs: that support it.
    """

    precondition: Precondition
    support: Support
    families: tuple[str, ...] = ()
    failing: bool = False
    runs: tuple[RunSupport, ...] = ()


class FalseAlarm(msgspec.Struct, frozen=True):
    """Measured on held-out healthy runs: in how many a rule applied, and in how many of those it failed.

    upper: 95 % upper confidence bound of the rate (Clopper and Pearson 1934), 0–1.
    """

    tested: int
    failed: int
    upper: float

    @classmethod
    def of(cls, tested: int, failed: int) -> FalseAlarm:
        """Raises `ValueError` unless 0 ≤ failed ≤ tested."""
        return cls(tested, failed, upper_bound(tested, failed))


class Standing(StrEnum):
    """Why a rule holds, which says what a violation of it in a stranger's program means. The loudest first.

    REPLICAS: what is one tensor held several times is not equal any more.
    CONTRADICTION: the training contradicts itself: an update or a clearing that is absent, a value that is not finite.
    LAW: how training works; no right program does otherwise.
    CHOICE: what a right program seldom does, and may do on purpose.
    HABIT: what the learned programs, or the options that they used, happen to do. For such programs only.
    """

    REPLICAS = "replicas"
    CONTRADICTION = "contradiction"
    LAW = "law"
    CHOICE = "choice"
    HABIT = "habit"


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What healthy programs of strangers said of a rule. A run is a program in one configuration.

    tested: runs on which the rule applied.
    failed: of those, on which it failed.
    retracted: of those, on which it failed while the run went on and held when the whole run was checked.
    programs: that the runs are of.
    corpus: which programs, as whoever measured it calls them.
    """

    tested: int
    failed: int
    retracted: int = 0
    programs: int = 0
    corpus: str = ""

    @property
    def clean(self) -> bool:
        return self.failed == 0 and self.retracted == 0


class Tier(StrEnum):
    """What a violation of a rule deserves: only vetted rules may wake somebody up."""

    TICKET = "ticket"
    PAGE = "page"


# A page needs a contradiction and a record of so many runs of strangers' programs without one false alarm: the upper bound
# of the rate is then a hundredth with 95 % confidence. Replicas that part page without such a record, unless it or a
# held-out run speaks against them, when they were learned from so many programs and kinds of program.
PAGE_RUNS = 300
PAGE_PROGRAMS = 3
PAGE_FAMILIES = 2


MAX_SKETCHES = 8  # of one name; beyond these the name tells nothing


class Definition(msgspec.Struct, frozen=True, order=True):
    """What a name of the user's was in the programs that a rule was learned from: sketches (`invariants.definition`), sorted."""

    name: str
    sketches: tuple[str, ...]


def union(several: Iterable[tuple[Definition, ...]]) -> tuple[Definition, ...]:
    """Definitions of rules that become one: a name may be any of what it was. Associative, commutative and idempotent."""
    found: dict[str, set[str]] = {}
    for definitions in several:
        for one in definitions:
            found.setdefault(one.name, set()).update(one.sketches)
    return tuple(Definition(name, tuple(sorted(found[name])[:MAX_SKETCHES])) for name in sorted(found))


class Invariant(msgspec.Struct, frozen=True):
    """A rule: hypothesis, when it applies, and how well supported it is."""

    id: str
    hypothesis: Hypothesis
    precondition: Precondition
    support: Support
    text: str  # the rule in one English sentence
    severity: Severity = Severity.ERROR
    evidence: Evidence = Evidence()
    diversity: Diversity = Diversity()
    false_alarm: FalseAlarm | None = None  # not measured: None
    tier: Tier = Tier.TICKET
    parts: tuple[Part, ...] = ()  # in a merged pack
    record: Record | None = None  # not measured on programs of strangers: None
    definitions: tuple[Definition, ...] = ()  # of the user's names in it, by name; () where they are not known

    @property
    def relation(self) -> str:
        return self.hypothesis.relation


def tier_of(
    severity: Severity,
    standing: Standing,
    diversity: Diversity,
    false_alarm: FalseAlarm | None,
    record: Record | None,
) -> Tier:
    """The loudest tier that a rule has earned."""
    contradicts = standing in (Standing.REPLICAS, Standing.CONTRADICTION) and severity.level >= Severity.ERROR.level
    doubted = (false_alarm is not None and false_alarm.failed > 0) or (record is not None and not record.clean)
    if not contradicts or doubted:
        return Tier.TICKET
    if record is not None and record.tested >= PAGE_RUNS:
        return Tier.PAGE
    wide = diversity.programs >= PAGE_PROGRAMS and diversity.families >= PAGE_FAMILIES
    quiet = false_alarm is not None and false_alarm.tested > 0
    return Tier.PAGE if standing is Standing.REPLICAS and wide and quiet else Tier.TICKET


def upper_bound(tested: int, failed: int, confidence: float = 0.95) -> float:
    """Upper bound of a rate of which `failed` of `tested` were seen (Clopper and Pearson 1934); 1 where nothing was.

    Raises:
        ValueError: unless 0 ≤ failed ≤ tested.
    """
    if not 0 <= failed <= tested:
        raise ValueError(f"{failed} of {tested} is no rate")
    if failed == tested:
        return 1.0
    low, high = failed / tested, 1.0
    for _ in range(40):  # the rate at which so few failures have a probability of 1 - confidence
        middle = (low + high) / 2
        if _at_most(failed, tested, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return round(high, 6)


def _at_most(failed: int, tested: int, rate: float) -> float:
    """Probability of at most `failed` failures of `tested`."""
    logs = [
        math.lgamma(tested + 1)
        - math.lgamma(k + 1)
        - math.lgamma(tested - k + 1)
        + k * math.log(rate)
        + (tested - k) * math.log1p(-rate)
        for k in range(failed + 1)
    ]
    return math.fsum(map(math.exp, logs))


def hypothesis_id(hypothesis: Hypothesis) -> str:
    """Stable identifier of a hypothesis, whatever its precondition."""
    return hashlib.sha256(msgspec.json.encode(hypothesis)).hexdigest()[:12]


def invariant_id(hypothesis: Hypothesis, precondition: Precondition) -> str:
    """Stable identifier: a hash of what the rule says, so that equal rules of two packs are one."""
    blob = msgspec.json.encode((hypothesis, precondition))
    return hashlib.sha256(blob).hexdigest()[:12]
