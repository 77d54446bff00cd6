"""Check a run while it goes on: records come in as they are written, violations go out as soon as they can be judged.

Finished steps are judged in windows (`invariants.windows`) whose bounds depend on step numbers alone, so it does not
matter in which pieces and from which process records arrive. A window is judged once every process has reached the
steps that it needs after its core; a process that lags behind by more than `patience` steps is not waited for. What a
window costs depends on its size, not on the length of the run.

`finish` gives the verdict on the run. While a run fits into `keep_records`, all of it is kept, and the verdict is that of
`checker.check` on the whole, for any chunking; of a longer run only the last steps are kept, and the verdict is that of
its windows, which know less than the whole where a rule speaks of all calls of a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa

from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Relation, registry
from proctor.invariants.trace import Part, Trace, assemble
from proctor.invariants.verdict import CheckResult, Violation
from proctor.invariants.windows import FOREVER, Window, reach_of
from proctor.verify._live import Live
from proctor.verify.checker import MAX_PLACES, Judged, check, judge, merge_rules
from proctor.verify.coverage import coverage
from proctor.verify.incident import callers, group

SIZE: Final = 8  # steps of a window, once a run has gone on for that long
PATIENCE: Final = 64  # steps that a process may lag behind
KEEP_RECORDS: Final = 4_000_000  # some 2 GiB with the views of relations

Records = Mapping[str, pa.Table | pa.RecordBatch]
"""Rows of any of the tables of `invariants.schema`, with the codes of the process that wrote them."""


@dataclass
class _Tally:
    """What the windows so far say of one rule."""

    met: int = 0
    failed: int = 0
    undecided: int = 0
    violation: Violation | None = None

    def add(self, judged: Judged) -> bool:
        """Whether this is the first violation."""
        self.met += judged.met
        self.failed += judged.failed
        self.undecided += judged.undecided
        if judged.violation is None:
            return False
        held, self.violation = self.violation, judged.violation
        if held is not None:
            places = [*held.places, *judged.violation.places][:MAX_PLACES]
            count = held.count + judged.violation.count
            self.violation = msgspec.structs.replace(held, count=count, places=places, confirmed=len(set(places)) > 1)
        return held is None


@dataclass
class OnlineChecker:
    """Judges the rules of some packs on one run as it goes on.

    Args:
        packs: rules; equal rules of several packs count once.
        run: the run's directory, or another name.
        program: as `run.json` says.
        relations: instead of all known ones.
        size: steps of a window. The first windows are smaller.
        patience: steps that a process may lag behind the one that is ahead before windows go on without it.
        keep_records: up to which the whole run is kept for `finish`.
    """

    packs: Sequence[Pack]
    run: str = ""
    program: str = ""
    relations: Mapping[str, Relation] | None = None
    size: int = SIZE
    patience: int = PATIENCE
    keep_records: int = KEEP_RECORDS
    errors: dict[str, str] = field(default_factory=dict)
    """Relations that could not be evaluated, and why."""
    early: list[Violation] = field(default_factory=list)
    """First violation of each rule as a window found it."""

    def __post_init__(self) -> None:
        known = registry() if self.relations is None else self.relations
        self._rules: dict[str, list[Invariant]] = defaultdict(list)
        for rule in merge_rules(self.packs):
            if rule.relation in known:
                self._rules[rule.relation].append(rule)
        self._known = {name: known[name] for name in self._rules}
        self._reach = reach_of(self._known.values())
        self._live: dict[str, Live] = {}
        self._tallies: dict[str, _Tally] = defaultdict(_Tally)
        self._next = -1  # first step that no window has judged
        self._whole = True

    def feed(self, process: str, records: Records, info: Mapping[str, Any] | None = None) -> list[Violation]:
        """Take records of one process, and judge what is now finished.

        Args:
            process: a name of it, such as its folder's.
            records: rows in the order in which they were written; some tables, or parts of them.
            info: its `process.json`, when it is known anew.

        Returns:
            violations of rules that were not violated before.

        Raises:
            TraceError: a table that no trace has, or one with other columns.
        """
        live = self._live.setdefault(process, Live(process, self.patience))
        live.add(records, info)
        return self._judge_finished()

    def finish(self) -> CheckResult:
        """The verdict on the run, all of whose records were fed."""
        if self._whole:
            return check(self._trace(), self.packs, relations=self.relations)
        while self._next < FOREVER:
            end = self._bound()
            self._judge(Window(self._next, end if end < self._ahead() else FOREVER, self._reach))
        return self._result()

    # -- windows -------------------------------------------------------------------------------------------------

    def _judge_finished(self) -> list[Violation]:
        found: list[Violation] = []
        while self._ready(self._bound()):
            found += self._judge(Window(self._next, self._bound(), self._reach))
            self._forget()
        return found

    def _bound(self) -> int:
        """Where the next window ends: windows double until they have their size, so that early bugs are seen early."""
        if self._next < 1:
            return 1
        return min(2 * self._next, self._next + self.size) if self._next < self.size else self._next + self.size

    def _ready(self, end: int) -> bool:
        training = [live for live in self._live.values() if live.trains]
        if not training:
            return False
        reached = [live.reached for live in training]
        if len(training) < max(live.world for live in training):
            reached.append(-1)  # a rank that has not come yet
        return min(reached) > end + self._reach or max(reached) > end + self._reach + self.patience

    def _ahead(self) -> int:
        return max((live.reached for live in self._live.values()), default=-1) + 1

    def _judge(self, window: Window) -> list[Violation]:
        self._next = window.end
        trace = self._trace(window)
        seen = coverage(trace)
        found = []
        for name, rules in self._rules.items():
            try:
                for judged in judge(trace, self._known[name], rules, seen, window):
                    tally = self._tallies[judged.rule.id]
                    if tally.add(judged) and tally.violation is not None:
                        found.append(tally.violation)
            except Exception as e:  # noqa: BLE001  a relation's own failure must not hide what the others find
                self.errors[name] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
        self.early += found
        return found

    def _trace(self, window: Window | None = None) -> Trace:
        parts = [live.part() for _, live in sorted(self._live.items())]
        return assemble(self.run, self.program, [Part(i, f, t) for i, f, t in parts], window)

    def _forget(self) -> None:
        """Let go of what no window needs any more, once the run is too long to be kept."""
        if sum(live.rows for live in self._live.values()) > self.keep_records:
            self._whole = False
        if not self._whole:
            following = Window(self._next, FOREVER, self._reach)
            for live in self._live.values():
                live.forget(following)

    def _result(self) -> CheckResult:
        trace = self._trace()
        rules = [rule for rules in self._rules.values() for rule in rules]
        tallies = [self._tallies[rule.id] for rule in rules]
        violations = [t.violation for t in tallies if t.violation is not None]
        unknown = sum(t.met > 0 and not t.failed and t.undecided == t.met for t in tallies)
        idle = sum(t.met == 0 for t in tallies)
        ranks = len({(p.run, p.rank) for p in trace.processes})
        upstream = {name: relation.upstream for name, relation in self._known.items()}
        notes = [f"relation {name} could not be evaluated: {why}" for name, why in sorted(self.errors.items())]
        return CheckResult(
            run=self.run,
            incidents=group(violations, upstream=upstream, calls=callers(trace, violations), ranks=ranks),
            checked=len(rules) - unknown - idle,
            not_triggered=idle,
            unknown=unknown,
            notes=[*coverage(trace).notes, *notes, f"the run is long: judged in windows of {self.size} steps"],
            steps=trace.steps,
            ranks=ranks,
        )


