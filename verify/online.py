"""Check a run while it goes on: records come in as they are written, and a step is judged when all ranks have ended it.

A step is judged with the steps around it (`LiveTrace.window`), so that what a round costs does not depend on how long
the run is. A relation says how many steps after a step it must see (`Relation.ahead`): none for replicas or norms, one
for the order of calls. Relations that hold a step against the whole past remember what they need (`Relation.remember`);
the others know the first steps and the last few, which is less than `checker.check` knows at the end of a run.

Training repeats itself: what looks like a window that was found healthy is not judged again (`_memo`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import polars as pl

from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Relation, registry
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult, Violation
from proctor.invariants.windows import Window, reach_of
from proctor.verify import _memo
from proctor.verify._live import LiveTrace, Records
from proctor.verify.checker import MAX_PLACES, Judged, judge, merge_rules
from proctor.verify.coverage import Coverage, coverage
from proctor.verify.incident import callers, group

PATIENCE: Final = 64  # steps that a process may lag behind
_MEMOS: Final = 512  # windows found healthy that are remembered, per relation


@dataclass(frozen=True)
class Round:
    """What one relation says of some steps.

    first, end: the steps, `end` not included; -1 is what came before training.
    judged: of each rule that applied.
    trace: the window that it was judged in; holds until the next round.
    """

    relation: str
    first: int
    end: int
    judged: Sequence[Judged]
    trace: Trace

    @property
    def violations(self) -> list[Violation]:
        return [j.violation for j in self.judged if j.violation is not None]


@dataclass
class _Tally:
    """What the rounds so far say of one rule."""

    met: int = 0
    failed: int = 0
    undecided: int = 0
    violation: Violation | None = None

    def add(self, judged: Judged) -> None:
        self.met += judged.met
        self.failed += judged.failed
        self.undecided += judged.undecided
        if judged.violation is None:
            return
        held, self.violation = self.violation, judged.violation
        if held is not None:
            places = [*held.places, *judged.violation.places][:MAX_PLACES]
            count = held.count + judged.violation.count
            self.violation = msgspec.structs.replace(held, count=count, places=places, confirmed=len(set(places)) > 1)


@dataclass
class OnlineChecker:
    """Judges the rules of some packs on one run as it goes on.

    Args:
        packs: rules; equal rules of several packs count once.
        run: the run's directory, or another name.
        program: as `run.json` says.
        relations: instead of all known ones.
        patience: steps that a process may lag behind the one that is ahead before it is not waited for.
        together: judge all steps that have ended in one round, which keeps up with any program; else step by step.
    """

    packs: Sequence[Pack]
    run: str = ""
    program: str = ""
    relations: Mapping[str, Relation] | None = None
    patience: int = PATIENCE
    together: bool = True
    errors: dict[str, str] = field(default_factory=dict)
    """Relations that could not be evaluated, and why."""

    def __post_init__(self) -> None:
        known = registry() if self.relations is None else self.relations
        rules: dict[str, list[Invariant]] = defaultdict(list)
        for rule in merge_rules(self.packs):
            if rule.relation in known:
                rules[rule.relation].append(rule)
        self._known = {name: known[name] for name in sorted(rules, key=lambda n: (known[n].ahead, known[n].upstream, n))}
        self._rules = dict(rules)
        self._reach = reach_of(self._known.values())
        self._tallies: dict[str, _Tally] = defaultdict(_Tally)
        self._memos: dict[str, OrderedDict[tuple[Any, ...], Sequence[Judged]]] = {n: OrderedDict() for n in self._known}
        self._past: dict[str, pl.DataFrame] = {}
        self._members = 0
        self._judged = -1  # the last step that is over
        self._trace: Trace | None = None
        self.live = LiveTrace(self.run, self.program)

    @property
    def judged(self) -> int:
        """The last step that was judged, -1 before any."""
        return self._judged

    def feed(
        self, process: str, records: Records, info: Mapping[str, Any] | None = None, reached: int | None = None
    ) -> list[Violation]:
        """Take records of one process (see `LiveTrace.add`), and judge what is now over.

        Returns:
            violations found.

        Raises:
            TraceError: a table that no trace has, or one with other columns.
        """
        self.live.add(process, records, info, reached)
        return [violation for round_ in self.rounds() for violation in round_.violations]

    def rounds(self) -> Iterator[Round]:
        """Judge the steps that are over since the last time, one relation after the other, the quick ones first."""
        self.live.settle()
        now = self._over()
        while self._judged < now:
            until = now if self.together else self._judged + 1
            yield from self._round(until, last=False)

    def finish(self) -> list[Round]:
        """Judge what is left, when nothing more will come."""
        self.live.settle()
        last = max((member.reached for member in self.live.members.values()), default=-1)
        return list(self._round(last, last=True)) if last >= 0 else []

    def _over(self) -> int:
        """The last step that all ranks have ended."""
        training = [member for member in self.live.members.values() if member.trains]
        going = [member for member in training if not member.gone]
        if not training:
            return -1
        reached = [member.reached for member in going or training]
        if len(training) < max(member.world for member in training):
            reached.append(0)  # a rank that has not come yet
        return max(min(reached), max(reached) - self.patience) - 1

    def _round(self, now: int, *, last: bool) -> Iterator[Round]:
        begin, self._judged = self._judged, max(now, self._judged)
        widest = max((relation.ahead for relation in self._known.values()), default=0)
        first = self._core(begin, widest, self._reach, now).first
        trace = self._trace = self._window(Window(first, now + 1, self._reach, now))
        seen = coverage(trace)
        if not last:
            trace.over = now
            seen = replace(seen, horizon=dict.fromkeys(range(len(trace.processes)), now + 1))
        look: bytes | None = None
        for name, relation in self._known.items():
            core = self._core(begin, relation.ahead, self._reach, now)
            if last:
                core = replace(core, end=now + 1)
            if core.end <= core.first:
                continue
            memo = None
            if relation.structural and not last:
                look = _memo.key(trace, now) if look is None else look
                memo = (look, core.first < 0, now - core.first, now - core.end)
            judged = self._judge(trace, name, core, seen, memo)
            yield Round(name, core.first, core.end, judged, trace)

    def _core(self, begin: int, ahead: int, reach: int, now: int) -> Window:
        """The steps to judge by a relation that wants to see `ahead` more, when those up to `begin` were over before."""
        first = begin + 1 - ahead
        return Window(-1 if begin < 0 else first, now + 1 - ahead, reach, now)

    def _judge(
        self, trace: Trace, name: str, core: Window, seen: Coverage, memo: tuple[Any, ...] | None
    ) -> Sequence[Judged]:
        relation, healthy = self._known[name], self._memos[name]
        if memo is not None and memo in healthy:
            healthy.move_to_end(memo)
            judged: Sequence[Judged] = healthy[memo]
        else:
            try:
                judged = [j for j in judge(trace, relation, self._rules[name], seen, core) if j.met]
                remembered = relation.remember(trace, core.first, core.end)
            except Exception as e:  # noqa: BLE001  a relation's own failure must not hide what the others find
                self.errors.setdefault(name, f"{type(e).__name__}: {e}".splitlines()[0][:200])
                return []
            if remembered is not None:
                self._past[name] = remembered
            if memo is not None and not any(j.failed for j in judged):
                healthy[memo] = judged
                if len(healthy) > _MEMOS:
                    healthy.popitem(last=False)
        for one in judged:
            self._tallies[one.rule.id].add(one)
        return judged

    def _window(self, window: Window) -> Trace:
        trace = self.live.window(window)
        if len(trace.processes) != self._members:  # processes have other numbers now
            self._members = len(trace.processes)
            self._past.clear()
        trace.past.update(self._past)
        return trace

    def result(self) -> CheckResult:
        """What the rounds so far say. Rules that speak of a whole run are judged by what each round held."""
        trace = self._trace if self._trace is not None else self.live.window(Window(-1, 0))
        rules = [rule for rules in self._rules.values() for rule in rules]
        tallies = [self._tallies[rule.id] for rule in rules]
        violations = [t.violation for t in tallies if t.violation is not None]
        unknown = sum(t.met > 0 and not t.failed and t.undecided == t.met for t in tallies)
        idle = sum(t.met == 0 for t in tallies)
        ranks = len({p.rank for p in trace.processes})
        upstream = {name: relation.upstream for name, relation in self._known.items()}
        notes = [f"relation {name} could not be evaluated: {why}" for name, why in sorted(self.errors.items())]
        return CheckResult(
            run=self.run,
            incidents=group(violations, upstream=upstream, calls=callers(trace, violations), ranks=ranks),
            checked=len(rules) - unknown - idle,
            not_triggered=idle,
            unknown=unknown,
            notes=[*(n for n in coverage(trace).notes if "did not finish" not in n), *notes, "judged while the run went on"],
            steps=max(0, self._judged + 1),
            ranks=ranks,
        )


