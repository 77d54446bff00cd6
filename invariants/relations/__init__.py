"""The relation interface and the registry of relations: one file each, found by import.

A relation answers five questions about traces:

* `propose` (or `survey` and `settle`, see below): which hypotheses does this trace suggest?
* `examples`: for many hypotheses at once, on which records did each pass or fail, and in which circumstances?
* `needs`: what must be recorded to check a hypothesis?
* `say`: what does the rule claim, in one English sentence?
* `detail`: for one failing example, what was expected, what was seen, and where?

Runs are learned from one shard (a run, or a part of it) at a time: each gives a `survey`, surveys are merged, and
`settle` says which hypotheses there are. By default those that any shard proposes; a relation whose hypotheses depend
on several runs (a pattern that no run breaks, a size seen in two of them) says in its survey what each run contributes.

All work is columnar: `examples` gets every hypothesis of the relation in one call and returns one frame. To add a
relation, write one file here with one subclass; nothing else changes (CONTRIBUTING.md walks through it). A relation of many
parts is a folder whose front file is the relation; `views` holds what several of them look up, `habits` those that hold of
the learned programs only.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal

import polars as pl

from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Standing, Tier, tier_of
from proctor.invariants.relations import _surveys
from proctor.invariants.trace import Trace

Confirm = Literal["at once", "repeat"]
Reads = Literal["calls", "records", "draws", "numbers"]


@dataclass(frozen=True)
class Examples:
    """What a relation saw for many hypotheses.

    frame: one row an example. Columns:
        hyp u32         index of the hypothesis
        passed bool     false where the relation failed; null: cannot be decided (UNKNOWN)
        proc u16, step i32, seq u32   where it was seen (first record)
        site u32        code of the source line, 0 if none
        and one column a field: text, null where not shared or not present; `<field>~` beside it, boolean, for
        examples of several records.
        Columns that start with `_` are the relation's own and reach `detail`.
    fields: names of the columns that may become conditions.
    scope: the subset that says in what kind of program a rule was learned. Conditions on them are kept while all
        evidence agrees on them, and vanish as evidence grows more diverse.
    """

    frame: pl.DataFrame
    fields: tuple[str, ...]
    scope: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needs:
    """What must be recorded for a rule: functions, attributes of tracked variables, values at calls."""

    functions: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()  # data, grad, buffer, optimizer
    values: frozenset[str] = frozenset()  # names of `schema.Value` in lower case: batch, rng, number, …

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.functions | other.functions, self.states | other.states, self.values | other.values)


@dataclass(frozen=True)
class Detail:
    """What a failing example says to a reader."""

    expected: str
    seen: str
    function: str = ""
    variable: str = ""
    module: str = ""
    advice: str = ""
    sides: tuple[tuple[int, ...], ...] = ()  # ranks that were compared, those that agree together, the fewest first


CALLED: Final = 6  # `upstream_of` rules that say no more than that calls are left out, are new, or come in another order: mostly a consequence


class Relation(ABC):
    """One family of rules."""

    name: ClassVar[str]
    code: ClassVar[str]  # PR1xx
    severity: ClassVar[Severity] = Severity.ERROR
    # Why its rules hold. A relation that does not say has habits of programs, which are not shipped.
    standing: ClassVar[Standing] = Standing.HABIT
    # Lower is more upstream: orders violations of one step inside an incident.
    upstream: ClassVar[int] = 5
    # Its rules speak of one program with its options: where several programs teach a pack, which is then meant for others, all have to keep one.
    own: ClassVar[bool] = False
    # Parameters that only narrow where a rule looks: without them it judges the same records, and more.
    narrowing: ClassVar[frozenset[str]] = frozenset()

    # Steps before and after a step that must be seen to judge it. None: some examples depend on the whole run, so that
    # a window of it (`invariants.windows`) judges them by what it holds.
    reach: ClassVar[int | None] = None
    # In a run that goes on: steps after a step that must be over before it is judged. 0: its own end is enough.
    ahead: ClassVar[int] = 1
    # It also speaks of calls that have not returned.
    waits: ClassVar[bool] = False
    # In a run that goes on: what verdicts depend on. `calls`: which calls were made how, but for numbers that they were
    # given or gave back (see `measures`). `records`: also which fingerprints of states and of what is sent or saved are equal,
    # and flags. `draws`: also those of batches and random states. `numbers`: also norms, numbers or times. Steps that look
    # like one that was found healthy, in what a relation reads, need not be judged again.
    reads: ClassVar[Reads] = "numbers"
    # In a run that goes on: it holds fingerprints of a process only against others of the same one, so that which ones are equal
    # on several ranks does not matter.
    alone: ClassVar[bool] = False
    # It reads what calls were given and gave back, not only that they were made; see `details`.
    reads_signatures: ClassVar[bool] = True
    # In a run that goes on: whether one failing step is enough to tell somebody, or it has to fail again soon after, as
    # what depends on chance should.
    confirm: ClassVar[Confirm] = "at once"
    # Columns of its surveys that are combined where the others are equal.
    folds: ClassVar[Mapping[str, _surveys.Fold]] = _surveys.PLAIN

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.propose is Relation.propose and cls.survey is Relation.survey:
            raise TypeError(f"{cls.__name__} says neither in `propose` nor in `survey` which hypotheses there are")

    def propose(self, trace: Trace) -> list[Hypothesis]:
        """Hypotheses that hold at least once in this trace; of a relation that gives a `survey`, those that follow from it alone."""
        return self.settle(self.survey(trace))

    def survey(self, trace: Trace) -> pl.DataFrame:
        """What one shard contributes to `settle`: a small table of texts and numbers, no codes."""
        return _surveys.of_hypotheses(self.propose(trace))

    def merge(self, surveys: Sequence[pl.DataFrame]) -> pl.DataFrame:
        """One survey of many; associative and commutative."""
        return _surveys.merge(surveys, self.folds)

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        """The hypotheses of all shards, from their merged survey."""
        return _surveys.hypotheses_of(survey)

    def arrange(self, orders: Collection[Sequence[str]]) -> tuple[str, ...]:
        """One order of the fields of `examples`, from those of several shards."""
        return _surveys.arrange(orders)

    @abstractmethod
    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        """Every passing and failing example of these hypotheses in this trace."""

    def severity_of(self, hypothesis: Hypothesis) -> Severity:
        """How loudly violations of this rule are reported: as all of its relation, unless overridden."""
        return self.severity

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Why this rule holds: as all of its relation, unless overridden."""
        return self.standing

    def upstream_of(self, hypothesis: Hypothesis) -> int:
        """How near to the cause violations of this rule are, lower is nearer: as all of its relation, unless overridden. That calls are other ones, `CALLED`, says the least."""
        return self.upstream

    def tier(self, rule: Invariant) -> Tier:
        """What a violation of one of its rules deserves. Judged anew wherever it counts: a pack may claim anything."""
        return tier_of(rule.severity, self.standing_of(rule.hypothesis), rule.diversity, rule.false_alarm, rule.record)

    def confirm_of(self, hypothesis: Hypothesis) -> Confirm:
        """When a violation of this rule is believed: as all of its relation, unless overridden."""
        return self.confirm

    def told_once(self, hypothesis: Hypothesis) -> bool:
        """In a run that goes on: whether a probe tells it once and then looks no more, so that later steps in which nothing is told say nothing."""
        return False

    @abstractmethod
    def needs(self, hypothesis: Hypothesis) -> Needs:
        """What to record so that this rule can be checked."""

    @abstractmethod
    def say(self, hypothesis: Hypothesis) -> str:
        """The rule in one English sentence, without its precondition."""

    @abstractmethod
    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        """Expected against seen, and the names to blame, for one failing row of `examples`."""

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        """`reads`, for this rule."""
        return self.reads

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        """In a run that goes on: functions whose numbers this rule reads: those among arguments and results, and sizes of tensors."""
        return frozenset()

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        """What this rule reads in signatures: functions (`MODEL_CALL`: of any model), and features of their arguments or results ("": any).

        A function with too many distinct signatures loses the numbers in them, then the sizes: the rule is then UNKNOWN. By default a
        rule that reads numbers is taken to read all those of the functions that it names.
        """
        if not self.reads_signatures:
            return frozenset()
        if self.reads_of(hypothesis) != "numbers":
            return frozenset((name, "") for name in self.measures(hypothesis))
        return frozenset((value, "") for _, value in hypothesis.params if isinstance(value, str) and "." in value)

    def remember(self, trace: Trace, first: int, end: int) -> pl.DataFrame | None:
        """What it must know of steps `first` to `end` (not included) when they are not held any more; it gets it back,
        with what it remembered before, as `trace.past[name]`. `None`: nothing."""
        return None

    def idle(self, trace: Trace) -> bool:
        """Whether a glance at the trace tells that none of its rules has an example there; `examples` is then not asked."""
        return False

    def implies(self, a: Hypothesis, b: Hypothesis) -> bool:
        """Whether every record on which b fails is one on which a fails, too, wherever both apply."""
        left, right = ({k: v for k, v in h.params if v not in (None, "")} for h in (a, b))
        only_right = {k for k in right if k not in left or left[k] != right[k]}
        return left.keys() <= right.keys() and only_right <= self.narrowing and not only_right & left.keys()


_REGISTRY: dict[str, Relation] = {}


def register(cls: type[Relation]) -> type[Relation]:
    """Class decorator: makes a relation known under its name."""
    instance = cls()
    _REGISTRY[cls.name] = instance
    return cls


def registry() -> dict[str, Relation]:
    """All relations by name; importing them, in this folder and those in it, is what registers them."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


@cache
def _import_all() -> None:
    """Once in a process: the folders are asked again for each rule of a pack otherwise."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if module.name not in sys.modules and "._" not in module.name:
            importlib.import_module(module.name)
