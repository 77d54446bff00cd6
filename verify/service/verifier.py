"""The verifier: one process a job that judges what its ranks send, step by step, and tells people.

`build` makes it and `serve` runs it. Records come as events from a queue that the server's thread fills (`transport`); one
thread, this one, gives them to `job`, follows incidents and hands notices to the pager, whose own threads talk to the network. Nothing here can reach the job:
when the verifier is slow or gone, ranks drop records and count them.

At the end of the job the recorded run is checked as a whole, which also judges what no window can; what that adds becomes
part of the incidents before the report is written.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import polars as pl

from proctor.invariants.capsule import capsules_of, read_capsule
from proctor.invariants.pack import Pack
from proctor.invariants.suppression import Suppression
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.coverage import coverage
from proctor.verify.incident import callers
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.live.groups import Round
from proctor.verify.live.online import OnlineChecker
from proctor.verify.live.pace import Pace
from proctor.verify.memory import give_back
from proctor.verify.metrics import Metrics, NoMetrics
from proctor.verify.service.job import Job
from proctor.verify.service.progress import Progress
from proctor.verify.service.teller import Teller, Tells
from proctor.verify.service.whole import Summary, check_whole, is_short, taken_back
from proctor.verify.silence import silence
from proctor.verify.transport.deaths import Deaths
from proctor.verify.transport.inbox import Inbox, Joined
from proctor.verify.view.events import EventLog
from proctor.verify.writers import Writer

TICK_S: Final = 0.5  # between two looks at the time
_TRIM_S: Final = 60.0  # between two times that unused memory is given back
_MOST_EVENTS: Final = 4096  # between two judgements
_FILL_S: Final = 1.5  # waited for records that are not in the files yet
_STUCK_S: Final = 5.0  # without the end of a step
_SETTLE_S, _SOON_S = 1.0, 0.1  # after the command has ended, for a process that is just about to connect; between two looks where all said goodbye
LINGER_S: Final = 20.0  # after the command has ended, for ranks that still hold a connection,
_STOPPING_S: Final = 3.0  # or after somebody asked the verifier to stop
_DONE_S: Final = 5.0  # without a command: after the last process said goodbye,
_RETURN_S: Final = 60.0  # or was lost, which an elastic launcher starts again
_FAILING_S: Final = 30.0  # in which no turn succeeds, until a new verifier may do better

_log: Final = logging.getLogger(__name__)


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
        hang_after_s: a longer wait of a rank for another one is told, whatever a rule grants.
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
    hang_after_s: float = math.inf
    finished: bool = False
    """Every process said goodbye."""

    def __post_init__(self) -> None:
        self.job = Job(
            self.run, self.packs, self.pack_names, self.fitting, self.book, self.metrics, self.log, self.say, self.clock, self._finish, self.pace,
            self.hang_after_s, lambda step: self.freeze("", step),
        )  # fmt: skip
        self._violations: dict[str, Violation] = {}
        self._deaths = Deaths()
        self._shown = Progress(self.log, self.writers, self.clock)
        self._teller = Teller(
            self.book, self.log, self.pager, self.metrics, self.writers,
            lambda key, step: self.freeze(key, step), self.say, self._try,
        )  # fmt: skip
        self._ended: float | None = None  # when the job was seen to be over
        self._alone: float | None = None  # when all its processes were seen to be gone
        self._troubles: set[str] = set()
        self._well = self.clock()  # when a turn succeeded
        self._failing = False  # the last one did not
        self._refused: dict[str, int] = {}
        self._paged: dict[str, int] = {}  # by outcome
        self._capsules: set[Path] = set()
        self._ticked = self._trimmed = self.clock()
        self._progress = self.clock()  # when a step ended, or it was looked why none does
        if self.book.restored:
            self._teller.tell(self.book.restarted("the verifier was started again; steps in between were not judged live"))

    @property
    def processes(self) -> list[str]:
        """Names of the processes that are there."""
        return self.job.roll.here

    @property
    def deserted(self) -> bool:
        """There were processes, and all are gone."""
        return self.job.roll.deserted

    @property
    def undelivered(self) -> bool:
        """After the end: whether notices wait in the outbox."""
        return self._teller.undelivered

    @property
    def _checker(self) -> OnlineChecker:
        """Of the job's present life."""
        return self.job.checker

    # -- the loop ------------------------------------------------------------------------------------------------

    def work(self) -> Summary:
        """Judge until the job is over."""
        while not self._over():
            self.turn(_SOON_S if self.deserted else TICK_S)
        return self.close()

    def turn(self, wait_s: float = TICK_S) -> None:
        """Take what has come, judge what is over, look at the time.

        Raises:
            Exception: of ours, after half a minute in which no turn succeeded: a new verifier hears all names again.
        """
        events = self.inbox.get(0.0 if self._checker.pending and not self._failing else wait_s, most=_MOST_EVENTS)
        self.job.patience = self.clock() + _FILL_S
        failed = [error for event in events if (error := self._try("records", partial(self.job.take, event))) is not None]
        if any(isinstance(event, Joined) for event in events):
            self._try("processes", lambda: self._deaths.watch(self.job.roll.local()), lost=False)
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
        short = self.job.roll.lives == 1 and not self.writers and is_short(self.run)  # writers draw what is judged step by step
        if not short:
            self._finish()
        self._try("processes", self._look_at_deaths, lost=False)
        self._deaths.close()
        summary = Summary()
        self._try("the whole run", lambda: self._look_at_whole(summary))
        if short and not summary.complete:  # what is not on disk may have been sent
            self._finish()
        self._checker.leave()
        if self._checker.judged >= 0:
            self._try("metrics", lambda: self.metrics.step(self._checker.judged, self.now()), lost=False)
        summary.violations, summary.judged = list(self._violations.values()), self.job.before + self._checker.judged
        if summary.result is None:
            self._try("verdict", lambda: setattr(summary, "live", self._checker.result()), lost=False)
        summary.lost = dict(self.job.lost)
        self._try("costs", self.job.read_costs, lost=False)
        if words := self.job.overheads.words():
            self.say(words)
        self.finished = self.job.roll.finished
        if summary.judged < 0 and summary.result is None:
            far = "" if not self.job.roll.peers else " to the end of a step"
            self.say(f"no process of the job trained{far} under watch, so nothing was judged  →  proctor doctor")
        self._try("incidents", lambda: self._teller.tell(self.book.close(finished=self.finished)), lost=False)
        self._try("view", self._teller.show, lost=False)
        last = summary.result or summary.live
        shown = partial(self._shown.show, self._checker, len(self._violations), self.job.overheads.worst(), checked=last.checked if last else 0)
        self._try("view", shown, lost=False)
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
        return (not there and since > (2 * _SOON_S if self.job.roll.finished else _SETTLE_S)) or since > (_STOPPING_S if stopped else LINGER_S)

    def _left(self, there: bool) -> bool:
        """Without a command to look at: whether the processes are gone for good."""
        if there or not self.deserted:
            self._alone = None
            return False
        self._alone = self.clock() if self._alone is None else self._alone
        return self.clock() - self._alone > (_DONE_S if self.job.roll.finished else _RETURN_S)

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
                self.job.count("internal", 1)
            return error
        return None

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
        latency = partial(self._latency, rounds[-1].trace, self._checker.judged)
        self._try("view", lambda: self._shown.show(self._checker, len(self._violations), self.job.overheads.worst(), latency=latency), lost=False)
        self._try("curves", lambda: self._shown.draw(rounds), lost=False)

    def _wanted(self, violation: Violation) -> bool:
        heard, _ = silence([violation], {self.job.program}, [*self.suppressions, *(s for p in self.job.packs for s in p.suppressions)])
        return bool(heard)

    def _latency(self, trace: Trace, step: int | None) -> float:
        """Seconds since the last call of a step returned, by the clock that all processes of a host share."""
        of = trace.contexts.filter(pl.col("step") == (-1 if step is None else step))["ctx"]
        ends = trace.calls.filter(pl.col("ctx").is_in(of.implode())).select((pl.col("t") + pl.col("dur")).max()).item()
        return max(0.0, time.monotonic() - ends / 1e9) if isinstance(ends, int) else 0.0

    def _finish(self) -> None:
        """Nothing more comes in this life of the job: what waits is judged."""
        self._try("steps", lambda: self._hear(self._checker.finish()))

    def _look_at_whole(self, summary: Summary) -> None:
        """Check the recorded run; what it adds is heard as one last judgement."""
        whole = check_whole(self.run, self.job.packs, self.suppressions, lives=self.job.roll.lives, say=self.say)
        if whole is None:
            return
        summary.trace, summary.info, summary.result = whole.trace, whole.info, whole.result
        back = taken_back(whole.result, self._violations, self.say)
        if back:
            self._violations.update(back)
            self._teller.tell(self.book.taken_back(list(back)))
        late = [v for v in whole.result.violations if v.id not in self._violations]
        if late:
            self._violations.update((v.id, v) for v in late)
            for violation in late:
                self.metrics.violated(violation.code, violation.severity)
            coords = {p.rank: p.coords for p in whole.trace.processes}
            calls = callers(whole.trace, late)
            self._teller.tell(self.book.judged([whole.judgement(late, self.job.packs)], calls=calls, ranks=len(coords), coords=coords))
        for note in coverage(whole.trace).notes[:3]:
            self.say(note)

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
                self.job.count(f"bad_peer: {reason}", number - self._refused.get(reason, 0))
                self._refused[reason] = number

    def _look_at_waiting(self) -> None:
        if self.clock() - self._progress > min(_STUCK_S, self.hang_after_s / 4):
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

    def _look_at_deaths(self) -> None:
        """Ranks of this host that a signal ended before they said goodbye."""
        for death in self._deaths.take():
            rank = self.job.roll.lost(death.process)
            if rank is not None:
                self._teller.tell(self.book.killed(rank, death.name, death.means, self._checker.live.member(death.process).reached))

    def _look_at_ranks(self) -> None:
        self._look_at_deaths()
        for process, at in self.heard_at().items():
            self.job.roll.signed(process, at)
        self._teller.tell(self.book.tick(self.job.roll.heard))
        self._teller.tell(self.book.coverage(self.job.lost, self.job.missing()))

    def _measure(self) -> None:
        heard = len(self.job.roll.heard)
        self.metrics.ranks(heard, max((m.world for m in self._checker.live.members.values()), default=0))
        self.metrics.alive(self.now())
        for outcome, number in self.paged().items():
            self.metrics.paged(outcome, max(0, number - self._paged.get(outcome, 0)))
            self._paged[outcome] = number
        if self.pager is not None:
            self.pager.alive(f"step {self._checker.judged}, {heard} ranks")
