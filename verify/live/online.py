"""Check a run while it goes on: records come in as they are written, and a step is judged when all ranks have ended it.

A step is judged with the steps around it (`LiveTrace.window`), so that what a round costs does not depend on how long
the run is. A relation says how many steps after a step it must see (`Relation.ahead`): none for replicas or norms, one
for the order of calls. Relations that hold a step against the whole past remember what they need (`Relation.remember`);
the others know the first steps and the last few, which is less than `checker.check` knows at the end of a run.

Training repeats itself: what looks like a window that was found healthy is not judged again (`_memo`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Reads, Relation, registry
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import FOREVER, Window, reach_of
from proctor.invariants.verdict import CheckResult, Violation
from proctor.verify.checker import Judged, judge
from proctor.verify.coverage import Coverage, coverage
from proctor.verify.incident import callers, group, nearness
from proctor.verify.live import memo as _memo
from proctor.verify.live.groups import QUICK, Group, Round, Tally, is_urgent
from proctor.verify.live.pace import Pace
from proctor.verify.live.records import LiveTrace, Records
from proctor.verify.rules import merge_rules

PATIENCE: Final = 64  # steps that a process may lag behind
_WAITING_S: Final = 1.0  # a call that has not returned for so long is something to look at
_BEHIND: Final = 64  # steps that are judged one by one, and at most in a window that may come again,
_NEWS: Final = 3  # unless so many of them looked like none before,
_LONG_S: Final = 0.3  # or one took so long
_SLICE_S: Final = 0.01  # that a round of what is not urgent takes before it is looked what has come
_LATE_SHARE: Final = 0.1  # of the time, for rules that are not `QUICK`
_MOST_ROWS: Final = 1 << 21  # records held, beyond which the others are judged at once: their steps are waited for


@dataclass
class OnlineChecker:
    """Judges the rules of some packs on one run as it goes on.

    Args:
        packs: rules; equal rules of several packs count once.
        run: the run's directory, or another name.
        program: as `run.json` says.
        relations: instead of all known ones.
        patience: steps that a process may lag behind the one that is ahead before it is not waited for.
        hang_after_s: a longer wait of a rank for another one is told, whatever a rule grants.
        together: judge many steps that have ended in one round, which keeps up with any program; else always step by step.
    pace: of rounds that are not urgent, where `rounds` may leave some for later.
    """

    packs: Sequence[Pack]
    run: str = ""
    program: str = ""
    relations: Mapping[str, Relation] | None = None
    patience: int = PATIENCE
    hang_after_s: float = math.inf
    together: bool = True
    pace: Pace = field(default_factory=Pace)
    errors: dict[str, str] = field(default_factory=dict)
    """Relations that could not be evaluated, and why."""

    def __post_init__(self) -> None:
        known = registry() if self.relations is None else self.relations
        groups: dict[tuple[str, Reads], list[Invariant]] = defaultdict(list)
        for rule in merge_rules(self.packs):
            if rule.relation in known:
                groups[rule.relation, known[rule.relation].reads_of(rule.hypothesis)].append(rule)
        self._groups = [Group(known[name], reads, groups[name, reads]) for name, reads in sorted(groups)]
        self._reach = reach_of(g.relation for g in self._groups)
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._past: dict[str, pl.DataFrame] = {}
        self._members = 0
        self._judged = self._seen = -1  # the last step that was judged, and that is known to be over
        self._going: Iterator[Round] | None = None  # a round of the rest that was left
        self._anew = False  # contradictions were looked for in a window that looked like none before
        self._next_late = self._spent = 0.0
        self._found = False  # something, in the present round of what is not urgent
        self._news = 0  # windows in a row that looked like none before
        self._source: Callable[[], Trace] | None = None
        self.live = LiveTrace(self.run, self.program)

    @property
    def live(self) -> LiveTrace:
        """The records."""
        return self._live

    @live.setter
    def live(self, live: LiveTrace) -> None:
        self._live, self._looks = live, _memo.Looks(live)

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

    @property
    def pending(self) -> bool:
        """Whether steps are over that only contradictions between ranks were looked for in: `rounds` is to be called again."""
        return self._going is not None or (self._judged < self._seen and self.pace.due(time.monotonic()))

    def rounds(self, *, some: bool = False) -> Iterator[Round]:
        """Judge the steps that are over since the last time, one relation after the other, the quick ones first.

        What ranks contradict each other in is looked at in all of these steps before anything else is. Rules that read numbers or
        random draws, which are judged anew in most windows, come with many steps at once, and else less often, so that they hold up
        the others for a small part of the time.

        Args:
            some: leave the rest for later after a short while, so that contradictions in what comes meanwhile need not wait for it; see
                `pending`.
        """
        self.live.settle()
        now = self._seen = max(self._seen, self._over())
        several = any(member.world > 1 for member in self.live.members.values())
        urgent = [g for g in self._groups if is_urgent(g)] if self.together and several else []
        while urgent and (done := min(g.done for g in urgent)) < now:
            # As below: one by one while they look alike, the others at once.
            yield from self._round(urgent, now if self._anew else done + 1)
        self._anew = False
        rest = [g for g in self._groups if g not in urgent]
        until = time.monotonic() + _SLICE_S if some else math.inf
        while self._going is not None or self._judged < now:
            if self._going is None:
                if some and not self.pace.due(time.monotonic()):
                    break
                self._going, self._found = self._next(rest, now), False
            begin = time.monotonic()
            for one in self._going:
                self._found |= any(judged.violation is not None for judged in one.judged)
                yield one
                if time.monotonic() >= until:
                    break
            else:
                self._going = None
            spent = time.monotonic() - begin
            self._spent += spent
            self.pace.took(spent)
            if self._going is None:
                self.pace.over(time.monotonic(), found=self._found)
            if time.monotonic() >= until:
                break
        late = [these for these in self._groups if these.done < self._judged]
        begin = time.monotonic()
        if late and (begin >= self._next_late or self.live.rows > _MOST_ROWS):
            # One at a time: what has come meanwhile goes first.
            yield from self._round([min(late, key=lambda g: (g.done, g.relation.name))], self._judged)
            spent = time.monotonic() - begin
            self._next_late = begin + spent / _LATE_SHARE

    def _next(self, groups: Sequence[Group], now: int) -> Iterator[Round]:
        """Of what is not urgent the next step, or all of them: windows look alike step by step, and what was seen before costs
        nothing; many new ones cost less at once, and so do all relations, whose views are made once."""
        behind = now - self._judged
        slow = self._news >= _NEWS or self._spent > _LONG_S
        many = self.together and (behind > _BEHIND or (behind > 1 and slow))
        self._judged = now if many else self._judged + 1
        self._news = 0 if many else self._news + 1
        self._spent = -math.inf if many else 0.0  # what many take says nothing of one
        return self._round([g for g in groups if many or not self.together or g.reads in QUICK], self._judged)

    def finish(self) -> list[Round]:
        """Judge what is left, when nothing more will come."""
        self.live.settle()
        going = list(self._going or ())
        self.leave()
        return [*going, *self._round(self._groups, self._judged, last=True)] if self._judged >= 0 else []

    def leave(self) -> None:
        """Nothing more will come, and what is left is judged elsewhere."""
        last = max((member.reached for member in self.live.members.values()), default=-1)
        self._going, self._judged = None, max(last, self._judged)
        self._seen = self._judged

    def stuck(self) -> list[Round]:
        """What is wrong with calls that have not returned: to be asked now and then while no step ends."""
        if not any(member.info.get("open") for member in self.live.members.values()):
            return []
        first = max(0, self._judged)
        self.live.settle()
        trace = self._window(Window(first, FOREVER, self._reach))
        seen = coverage(trace)
        found = []
        for these in self._groups:
            if these.relation.waits:
                judged = self._judge(lambda: (trace, seen), these, Window(first, FOREVER, self._reach), None)
                found.append(Round(these.relation.name, first, trace.steps, [j for j in judged if j.violation], lambda: trace))
        return [one for one in found if one.violations]

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

    def _round(self, groups: Sequence[Group], now: int, *, last: bool = False) -> Iterator[Round]:
        first = min((self._core(these, now).first for these in groups), default=now)
        window = Window(first, now + 1, self._reach, now)
        self.live.forget(min((self._core(these, now).first for these in self._groups), default=first) - self._reach)
        scene = cache(partial(self._prepare, window, last=last))
        source = self._source = lambda: scene()[0]
        waiting = any(member.waits(_WAITING_S) for member in self.live.order)
        keys: dict[tuple[Reads, bool, frozenset[str]], bytes] = {}
        for these in sorted(groups, key=lambda g: (g.relation.ahead, g.reads not in QUICK, g.relation.alone, g.cost)):
            core = self._core(these, now)
            these.done = now
            if last:
                core = replace(core, end=now + 1)
            if core.end <= core.first:
                continue
            memo = None
            if these.reads != "numbers" and not last and not waiting and now - first <= _BEHIND:
                kind = these.reads, these.relation.alone, these.measures
                if kind not in keys:
                    keys[kind] = self._looks.key(window, these.reads, alone=these.relation.alone, measures=these.measures)
                memo = (keys[kind], now - first, now - core.first, core.first < 0)
            judged = self._judge(scene, these, core, memo)
            yield Round(these.relation.name, core.first, core.end, judged, source)

    def _prepare(self, window: Window, *, last: bool) -> tuple[Trace, Coverage]:
        """The records of a round and what they can show."""
        trace = self._window(window)
        trace.since, trace.ends = window.first, last
        if last:
            return trace, coverage(trace)
        trace.over = window.now
        return trace, coverage(trace, window.end)

    def _core(self, these: Group, now: int) -> Window:
        """The steps to judge, when those up to `done` were over before."""
        ahead = these.relation.ahead
        return Window(-1 if these.done < 0 else these.done + 1 - ahead, now + 1 - ahead, self._reach, now)

    def _judge(
        self, scene: Callable[[], tuple[Trace, Coverage]], these: Group, core: Window, memo: tuple[Any, ...] | None
    ) -> Sequence[Judged]:
        name, healthy = these.relation.name, these.healthy
        if memo is not None and memo in healthy:
            healthy.move_to_end(memo)
            if these.reads == "records" and not these.relation.alone:
                self._news = 0
            judged = healthy[memo]
        else:
            self._anew |= is_urgent(these)
            trace, seen = scene()
            begin = time.perf_counter()
            try:
                judged = [j for j in judge(trace, these.relation, these.rules, seen, core) if j.met or j.blind]
                remembered = these.relation.remember(trace, core.first, core.end) if these.reads == "numbers" else None
            except Exception as e:  # noqa: BLE001  a relation's own failure must not hide what the others find
                self.errors.setdefault(name, f"{type(e).__name__}: {e}".splitlines()[0][:200])
                return []
            these.cost = 0.8 * these.cost + 0.2 * (time.perf_counter() - begin)
            if remembered is not None:
                self._past[name] = remembered
            if memo is not None and not any(j.failed for j in judged):
                these.remember(memo, judged)
        for one in judged:
            self._tallies[one.rule.id].add(one)
        return judged

    def _window(self, window: Window) -> Trace:
        trace = self.live.window(window)
        if len(trace.processes) != self._members:  # processes have other numbers now
            self._members = len(trace.processes)
            self._past.clear()
        trace.past.update(self._past)
        trace.hang_after_s = self.hang_after_s
        return trace

    def result(self) -> CheckResult:
        """What the rounds so far say. Rules that speak of a whole run are judged by what each round held."""
        trace = self._source() if self._source is not None else self.live.window(Window(-1, 0))
        rules = [rule for these in self._groups for rule in these.rules]
        tallies = [self._tallies[rule.id] for rule in rules]
        violations = [t.violation for t in tallies if t.violation is not None]
        unknown = sum(not t.failed and (t.blind or 0 < t.met == t.undecided) for t in tallies)
        idle = sum(t.met == 0 and not t.blind for t in tallies)
        ranks = len({p.rank for p in trace.processes})
        upstream = nearness({g.relation.name: g.relation for g in self._groups}, rules)
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


