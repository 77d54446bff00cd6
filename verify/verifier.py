"""The verifier: one process a job that judges what its ranks send, step by step, and tells people.

Records come as events from a queue that the server's thread fills (`transport`); one thread, this one, feeds the checker,
follows incidents and hands notices to the pager, whose own threads talk to the network. Nothing here can reach the job:
when the verifier is slow or gone, ranks drop records and count them.

At the end of the job the recorded run is checked as a whole, which also judges what no window can; what that adds becomes
part of the incidents before the report is written.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from proctor.errors import ProctorError, TraceError
from proctor.invariants.capsule import capsules_of, read_capsule
from proctor.invariants.fit import misfit, said
from proctor.invariants.invariant import Severity, Tier
from proctor.invariants.pack import Pack
from proctor.invariants.suppression import Suppression
from proctor.invariants.trace import Run, Trace
from proctor.invariants.verdict import TAKEN_BACK, CheckResult, Violation
from proctor.verify._memory import give_back
from proctor.verify._overhead import Overheads
from proctor.verify._pace import Pace
from proctor.verify._roll import Roll
from proctor.verify.checker import Judged, check
from proctor.verify.coverage import coverage
from proctor.verify.fill import fill
from proctor.verify.inbox import Event, Gap, Inbox, Joined, Left, Rows, Told
from proctor.verify.incident import callers
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.metrics import Metrics, NoMetrics
from proctor.verify.online import OnlineChecker, Round
from proctor.verify.series import curves
from proctor.verify.silence import silence
from proctor.verify.teller import Teller, Tells
from proctor.verify.view.events import CoverageEvent, EventLog, StepEvent
from proctor.verify.writers import Writer

TICK_S: Final = 0.5  # between two looks at the time
_TRIM_S: Final = 60.0  # between two times that unused memory is given back
_MOST_EVENTS: Final = 4096  # between two judgements
_FILL_S: Final = 1.5  # waited for records that are not in the files yet
_STUCK_S: Final = 5.0  # without the end of a step
_SETTLE_S: Final = 1.0  # after the command has ended, for a process that is just about to connect
LINGER_S: Final = 20.0  # after the command has ended, for ranks that still hold a connection,
_STOPPING_S: Final = 3.0  # or after somebody asked the verifier to stop
_DONE_S: Final = 5.0  # without a command: after the last process said goodbye,
_RETURN_S: Final = 60.0  # or was lost, which an elastic launcher starts again
_FAILING_S: Final = 30.0  # in which no turn succeeds, until a new verifier may do better
MAX_WHOLE_BYTES: Final = 256 * 1024 * 1024  # of a recorded run that is checked as a whole at the end

_log: Final = logging.getLogger(__name__)


@dataclass
class Summary:
    """What the verifier saw of a job, for its report and exit code."""

    violations: list[Violation]
    judged: int
    lost: Mapping[str, int]
    result: CheckResult | None = None
    trace: Trace | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def worst(self) -> Severity | None:
        return max((v.severity for v in self.violations), key=lambda s: s.level, default=None)


@dataclass(frozen=True)
class _Whole:
    """The recorded run as one judgement."""

    first: int
    end: int
    judged: Sequence[Judged]


@dataclass
class Verifier:
    """Judges one job.

    Args:
        run: run directory, written or not by this host.
        pack_names: what reports call them.
        packs: rules; with `fitting` those of them whose requirements the job meets, once that is known.
        inbox: what its processes send.
        going: whether the command runs; without one the job is over when all its processes are, and do not come back.
        stopped: whether somebody asked this verifier to stop.
        refused: peers that were turned away so far, by reason.
        paged: notices so far, by what became of them.
        heard_at: when each process that is connected was heard last, be it a sign of life; by `clock`.
        book: its incidents.
        log: for the live view.
        pager: where notices go; `None`: nowhere.
        metrics: for monitoring systems.
        writers: of experiment trackers, which get curves and incidents.
        suppressions: besides those of the packs.
        freeze: asks all ranks to keep their last steps: capsule key and step.
        say: one line for whoever watches the terminal.
        now, clock: epoch seconds, and seconds that never jump.
        pace: of rounds that are not urgent.
    """

    run: Path
    packs: Sequence[Pack]
    inbox: Inbox
    book: IncidentBook
    log: EventLog
    going: Callable[[], bool] | None = None
    stopped: Callable[[], bool] = lambda: False
    refused: Callable[[], Mapping[str, int]] = dict
    heard_at: Callable[[], Mapping[str, float]] = dict
    paged: Callable[[], Mapping[str, int]] = dict
    pack_names: Sequence[str] = ()
    fitting: bool = False
    pager: Tells | None = None
    metrics: Metrics = field(default_factory=NoMetrics)
    writers: Sequence[Writer] = ()
    suppressions: Sequence[Suppression] = ()
    freeze: Callable[[str, int], None] = lambda key, step: None
    say: Callable[[str], None] = lambda text: None
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    pace: Callable[[], Pace] = Pace
    finished: bool = False
    """Every process said goodbye."""

    def __post_init__(self) -> None:
        self._program = ""
        self._roll = Roll(self.clock)
        self.overheads = Overheads()
        self._lost: dict[str, int] = {}
        self._violations: dict[str, Violation] = {}
        self._checker = self._fresh()
        self._teller = Teller(
            self.book, self.log, self.pager, self.metrics, self.writers,
            lambda key, step: self.freeze(key, step), self.say, self._try,
        )  # fmt: skip
        self._before = 0  # steps judged in earlier lives of the job
        self._ended: float | None = None  # when the job was seen to be over
        self._alone: float | None = None  # when all its processes were seen to be gone
        self._troubles: set[str] = set()
        self._well = self.clock()  # when a turn succeeded
        self._failing = False  # the last one did not
        self._patience = self.clock()  # until when this turn may wait for records
        self._refused: dict[str, int] = {}
        self._paged: dict[str, int] = {}  # by outcome
        self._capsules: set[Path] = set()
        self._ticked = self._trimmed = self.clock()
        self._stepped = (self.clock(), -1)
        self._rate = 0.0
        self._drawn = -1
        self._progress = self.clock()  # when a step ended, or it was looked why none does
        if self.book.restored:
            self._teller.tell(self.book.restarted("the verifier was started again; steps in between were not judged live"))

    @property
    def processes(self) -> list[str]:
        """Names of the processes that are there."""
        return self._roll.here

    @property
    def deserted(self) -> bool:
        """There were processes, and all are gone."""
        return self._roll.deserted

    @property
    def undelivered(self) -> bool:
        """After the end: whether notices wait in the outbox."""
        return self._teller.undelivered

    # -- the loop ------------------------------------------------------------------------------------------------

    def work(self) -> Summary:
        """Judge until the job is over."""
        while not self._over():
            self.turn()
        return self.close()

    def turn(self, wait_s: float = TICK_S) -> None:
        """Take what has come, judge what is over, look at the time.

        Raises:
            Exception: of ours, after half a minute in which no turn succeeded: a new verifier hears all names again.
        """
        events = self.inbox.get(0.0 if self._checker.pending and not self._failing else wait_s, most=_MOST_EVENTS)
        self._patience = self.clock() + _FILL_S
        failed = [error for event in events if (error := self._try("records", partial(self._take, event))) is not None]
        failed += [error for error in [self._try("steps", self._judge)] if error is not None]
        if self.clock() - self._ticked >= TICK_S:
            self._ticked = self.clock()
            self._tick()
        self._failing = bool(failed)
        if not failed:
            self._well = self.clock()
        elif self.clock() - self._well > _FAILING_S:
            raise failed[0]

    def close(self) -> Summary:
        """Judge what is left, check the whole, tell the last; whatever fails, the rest is done."""
        self._try("steps", lambda: self._hear(self._checker.finish()))
        judged = self._before + self._checker.judged
        summary = Summary(list(self._violations.values()), judged, dict(self._lost))
        self._try("the whole run", lambda: self._check_whole(summary))
        summary.lost = dict(self._lost)
        if words := self.overheads.words():
            self.say(words)
        self.finished = self._roll.finished
        if summary.judged < 0 and summary.result is None:
            far = "" if not self._roll.peers else " to the end of a step"
            self.say(f"no process of the job trained{far} under watch, so nothing was judged  →  proctor doctor")
        self._try("incidents", lambda: self._teller.tell(self.book.close(finished=self.finished)), lost=False)
        self._try("view", self._teller.show, lost=False)
        self._try("view", lambda: self._step_event(finished=True), lost=False)
        self._try("view", self.log.close, lost=False)
        for writer in self.writers:
            self._try("a writer", writer.close, lost=False)
        self._try("paging", lambda: self._teller.close(finished=self.finished), lost=False)
        self._try("metrics", self.metrics.close, lost=False)
        return summary

    def _over(self) -> bool:
        there = bool(self.processes) or len(self.inbox) > 0
        stopped = self.stopped()
        if not stopped and (self.going() if self.going is not None else not self._left(there)):
            self._ended = None
            return False
        self._ended = self.clock() if self._ended is None else self._ended
        since = self.clock() - self._ended
        return (not there and since > _SETTLE_S) or since > (_STOPPING_S if stopped else LINGER_S)

    def _left(self, there: bool) -> bool:
        """Without a command to look at: whether the processes are gone for good."""
        if there or not self.deserted:
            self._alone = None
            return False
        self._alone = self.clock() if self._alone is None else self._alone
        return self.clock() - self._alone > (_DONE_S if self._roll.finished else _RETURN_S)

    def _try(self, what: str, work: Callable[[], object], *, lost: bool = True) -> Exception | None:
        """Do it; a mistake of ours is said once, counts as lost coverage, and does not end the watch."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  whatever it is, the next step can be judged
            text = f"{what}: internal error: {type(error).__name__}: {error}"[:300]
            if text not in self._troubles and len(self._troubles) < 100:
                self._troubles.add(text)
                self.say(f"{text}; watching goes on")
                _log.info("%s", what, exc_info=True)
            if lost:
                self._count("internal", 1)
            return error
        return None

    # -- records -------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Joined) and self._roll.begins(event):
            self._again()
        peer = self._roll.hear(event.process)
        if peer is None:
            return  # it belongs to an earlier life of the job
        live = self._checker.live
        try:
            match event:
                case Joined():
                    self._join(event)
                case Rows():
                    live.add(event.process, event.records, reached=event.reached)
                case Told():
                    peer.tell(event.info)
                    live.member(event.process).tell(event.info)
                    self.metrics.overhead(self.overheads.hear(event.process, event.info))
                case Gap():
                    self._fill(event)
                case Left():
                    self._roll.leave(event)
                    live.member(event.process).gone = True
        except TraceError as e:
            self._count("refused", 1)
            self.say(str(e))

    def _again(self) -> None:
        """The job was started again: steps count from 0."""
        self._try("steps", lambda: self._hear(self._checker.finish()))
        self._before += self._checker.judged + 1
        self._roll.begin()
        self.book.begin_life()
        self._checker = self._fresh()

    def _join(self, event: Joined) -> None:
        self._roll.join(event)
        rank = self._roll.peers[event.process].rank
        if rank >= 0:
            self.book.joined(rank, event.process)
        if self.fitting:
            self._fit(event.info)
        self._checker.live.add(event.process, {}, event.info)
        self._checker.live.member(event.process).gone = False

    def _fill(self, gap: Gap) -> None:
        """Records are missing: they are read from the run's files, or count as lost."""
        member = self._checker.live.member(gap.process)
        found = fill(self.run, gap, wait_s=0.0 if member.gone else max(0.0, self._patience - self.clock()))
        if found.records:
            self._checker.live.add(gap.process, found.records)
        if found.missing:
            member.lose(found.missing)
            self._count("gap", found.missing)
            self.say(f"{found.missing} records of {gap.process} did not arrive ({found.why}); the steps around them are unknown")

    def _fresh(self) -> OnlineChecker:
        return OnlineChecker(self.packs, run=str(self.run), program=self._program_name(), pace=self.pace())

    def _program_name(self) -> str:
        if not self._program:
            try:
                self._program = str(json.loads((self.run / "run.json").read_bytes()).get("program", ""))
            except (OSError, ValueError):
                self._program = ""
        return self._program

    def _fit(self, info: Mapping[str, Any]) -> None:
        """Of the shipped packs keep those that are for what this job uses."""
        versions = said(info)
        kept = [pack for pack in self.packs if not misfit(pack.requires, versions)]
        self.fitting = False
        if len(kept) < len(self.packs):
            self.pack_names = [n for n, pack in zip(self.pack_names, self.packs, strict=False) if any(pack is one for one in kept)]
            self.packs = kept
            live, self._checker = self._checker.live, self._fresh()
            self._checker.live = live
        rules = sum(len(pack.invariants) for pack in kept)
        self.say(f"watching with {rules} rules of {len(kept)} packs that fit this job")

    # -- judging -------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        rounds: list[Round] = []
        try:
            for one in self._checker.rounds(some=True):
                rounds.append(one)
                for violation in one.violations:
                    self.metrics.latency(self._latency(one.trace, violation.step))
        finally:  # what was found before something failed is told
            if rounds:
                self._progress = self.clock()
                self._hear(rounds)

    def _hear(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        heard = [replace(one, judged=[j for j in one.judged if j.violation is None or self._wanted(j.violation)]) for one in rounds]
        found = [v for one in heard for v in one.violations]
        for violation in found:
            if self._violations.setdefault(violation.id, violation) is violation:
                self.metrics.violated(violation.code, violation.severity)
        self.metrics.checked(sum(len(one.judged) for one in rounds))
        self.metrics.step(self._checker.judged, self.now())
        coords = self._checker.live.coords
        failing = next((one for one in heard if one.violations), None)
        calls = callers(failing.trace, found) if failing is not None else frozenset[tuple[str, str]]()
        self._teller.tell(self.book.judged(heard, calls=calls, ranks=len(coords), coords=coords))
        self._try("view", self._teller.show, lost=False)
        self._try("view", lambda: self._step_event(seen=rounds[-1]), lost=False)
        self._try("curves", lambda: self._draw(rounds), lost=False)

    def _draw(self, rounds: Sequence[Round]) -> None:
        """Points of the judged steps, for those who draw curves elsewhere."""
        if not self.writers:
            return
        trace = rounds[-1].trace
        first, end = max(0, min(r.first for r in rounds)), max(r.end for r in rounds)
        points: dict[int, dict[str, float]] = {}
        for name, (steps, values) in curves(trace).items():
            for step, value in zip(steps, values, strict=True):
                if first <= step < end and step > self._drawn:
                    points.setdefault(step, {})[name] = value
        for step in sorted(points):
            self._drawn = step
            for writer in self.writers:
                writer.series(step, points[step])

    def _wanted(self, violation: Violation) -> bool:
        heard, _ = silence([violation], {self._program_name()}, [*self.suppressions, *(s for p in self.packs for s in p.suppressions)])
        return bool(heard)

    def _latency(self, trace: Trace, step: int | None) -> float:
        """Seconds since the last call of a step returned, by the clock that all processes of a host share."""
        of = trace.contexts.filter(pl.col("step") == (-1 if step is None else step))["ctx"]
        ends = trace.calls.filter(pl.col("ctx").is_in(of.implode())).select((pl.col("t") + pl.col("dur")).max()).item()
        return max(0.0, time.monotonic() - ends / 1e9) if isinstance(ends, int) else 0.0

    # -- time ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._try("peers", self._count_refused)
        self._try("calls that wait", self._look_at_waiting)
        self._try("incidents", self._look_at_ranks)
        self._try("capsules", self._look_at_capsules, lost=False)
        self._try("view", self._teller.show, lost=False)
        self._try("paging", self._teller.page, lost=False)
        self._try("metrics", self._measure, lost=False)
        if self.clock() - self._trimmed > _TRIM_S:
            self._trimmed = self.clock()
            self._try("memory", give_back, lost=False)

    def _count_refused(self) -> None:
        for reason, number in self.refused().items():
            if number > self._refused.get(reason, 0):
                self._count(f"bad_peer: {reason}", number - self._refused.get(reason, 0))
                self._refused[reason] = number

    def _look_at_waiting(self) -> None:
        if self.clock() - self._progress > _STUCK_S:
            self._progress = self.clock()
            self._hear(self._checker.stuck())

    def miss_capsules(self, asked: Collection[str]) -> None:
        """The job is over: say of which incidents no step was kept.

        Args:
            asked: keys of those of which ranks were asked to keep one.
        """
        self._try("capsules", self._look_at_capsules, lost=False)
        for key in asked:
            self.book.lacks_capsule(key, "No step was kept: the ranks had ended, or were past it, when they were asked.")
        self.book.save()

    def _look_at_capsules(self) -> None:
        """Capsules that ranks of this host have written since."""
        for path in capsules_of(self.run):
            if path not in self._capsules:
                self._capsules.add(path)
                capsule = read_capsule(path)
                if capsule.control is None:
                    self.book.attach_capsule(capsule.key, str(path.relative_to(self.run)))

    def _look_at_ranks(self) -> None:
        for process, at in self.heard_at().items():
            self._roll.signed(process, at)
        self._teller.tell(self.book.tick(self._roll.heard))
        self._teller.tell(self.book.coverage(self._lost, self._missing()))

    def _measure(self) -> None:
        heard = len(self._roll.heard)
        self.metrics.ranks(heard, max((m.world for m in self._checker.live.members.values()), default=0))
        self.metrics.alive(self.now())
        for outcome, number in self.paged().items():
            self.metrics.paged(outcome, max(0, number - self._paged.get(outcome, 0)))
            self._paged[outcome] = number
        if self.pager is not None:
            self.pager.alive(f"step {self._checker.judged}, {heard} ranks")

    def _missing(self) -> Collection[int]:
        """Ranks that have not come, once another one has trained for a while."""
        members = [m for m in self._checker.live.members.values() if m.trains]
        if not members or max(m.reached for m in members) < 8:
            return ()
        return self._roll.missing(max(m.world for m in members))

    def _count(self, reason: str, number: int) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + number
        self.metrics.dropped(reason.partition(":")[0], number)
        self.log.append(CoverageEvent(lost=dict(self._lost)))

    # -- the view ------------------------------------------------------------------------------------------------------

    def _step_event(self, *, finished: bool = False, seen: Round | None = None) -> None:
        members = [m for m in self._checker.live.members.values() if m.trains]
        ahead = max((m.reached for m in members), default=-1)
        behind = min(members, key=lambda m: m.reached, default=None)
        at, step = self._stepped
        if self.clock() - at >= 1.0:
            self._rate = (self._checker.judged - step) / (self.clock() - at)
            self._stepped = self.clock(), self._checker.judged
        elif not finished and self._checker.judged % 8:
            return  # often enough
        lags = behind is not None and behind.reached < ahead - 1
        result, worst = self._checker.result() if finished else None, self.overheads.worst()
        self.log.append(
            StepEvent(
                step=self._checker.judged,
                ahead=ahead,
                ranks=len(members),
                behind=_rank(behind.info) if behind is not None and lags else None,
                behind_step=behind.reached if behind is not None and lags else None,
                checked=result.checked if result else 0,
                violated=len(self._violations),
                rate=max(0.0, self._rate),
                latency_ms=1e3 * self._latency(seen.trace, self._checker.judged) if seen is not None else 0.0,
                overhead=worst.share if worst.budget else 0.0,
                delay=worst.delay,
                finished=finished,
            )
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _check_whole(self, summary: Summary) -> None:
        """Check the recorded run; what it adds is heard as one last judgement."""
        size = sum(f.stat().st_size for f in self.run.glob("procs/*/*.arrow")) if self.run.is_dir() else 0
        if not 0 < size <= MAX_WHOLE_BYTES:
            if size:
                self.say(f"the run is too long to be checked as a whole here  →  proctor check {self.run}")
            return
        try:
            run = Run(self.run)
            trace = run.trace
            if max(Counter((p.run, p.rank) for p in trace.processes if p.world > 1).values(), default=0) > 1:
                self.say(f"the job was started {self._roll.lives} times: each was judged as it went on, and the run not as a whole")
                return
            summary.trace = trace
            summary.info = run.info
            summary.result = result = check(trace, self.packs, suppressions=self.suppressions)
        except (ProctorError, OSError) as e:
            self.say(f"the recorded run could not be checked as a whole: {e}")
            return
        self._take_back(result)
        late = [v for v in result.violations if v.id not in self._violations]
        for violation in late:
            self._violations[violation.id] = violation
        if late:
            rules = {rule.id: rule for pack in self.packs for rule in pack.invariants}
            whole = _Whole(-1, trace.steps, [Judged(rules[v.id], v.count, v.count, 0, v) for v in late if v.id in rules])
            coords = {p.rank: p.coords for p in trace.processes}
            self._teller.tell(self.book.judged([whole], calls=callers(trace, late), ranks=len(coords), coords=coords))
        summary.violations = list(self._violations.values())
        for note in coverage(trace).notes[:3]:
            self.say(note)

    def _take_back(self, result: CheckResult) -> None:
        """What failed while the run went on and holds in the whole run was our mistake: it is said, and counts as a warning."""
        wrong = [v for v in self._violations.values() if v.id in result.held]
        for violation in wrong:
            quieter = min(violation.severity, Severity.WARNING, key=lambda s: s.level)
            told = msgspec.structs.replace(violation, severity=quieter, tier=Tier.TICKET, advice=f"{TAKEN_BACK}. {violation.advice}")
            self._violations[violation.id] = told
            result.notes.append(f"rule {violation.id} ({violation.text}): {TAKEN_BACK}")
            self.say(f"rule {violation.id} ({violation.text}): {TAKEN_BACK}")
        if wrong:
            self._teller.tell(self.book.taken_back([v.id for v in wrong]))


def _rank(info: Mapping[str, Any]) -> int | None:
    rank = info.get("rank")
    return rank if isinstance(rank, int) else None
