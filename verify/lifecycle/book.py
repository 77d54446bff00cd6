"""The incidents of one job while it runs: from verdicts to what people are told.

The verifier calls `judged` after each evaluation, `coverage` when it knows of losses, `tick` once a second and `close` at
the end, from one thread. Each gives the notices that are to be sent now. Example:

    book = IncidentBook("llama-7b", "node-0", state_path=run / "verify" / "incidents.json")
    outbox.extend(book.unsent)                      # of a verifier that was killed
    notices = book.judged(checker.rounds(), ranks=world, coords=coords)
    outbox.extend(notices)
    book.taken()

The state is written before notices are given out and again when they were taken, so that a verifier that is killed
sends each at least once, with the same key and moment, and tells nobody again what they know.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from proctor.errors import TraceError
from proctor.invariants.invariant import Tier
from proctor.invariants.relations import Relation, registry
from proctor.invariants.verdict import TAKEN_BACK
from proctor.verify.lifecycle.cases import Cases
from proctor.verify.lifecycle.deviation import Coords
from proctor.verify.lifecycle.evaluations import Judgement, by_step
from proctor.verify.lifecycle.monitor import Monitor
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.lifecycle.record import State, TrackedIncident
from proctor.verify.lifecycle.snapshot import VERSION, Snapshot, read, write
from proctor.verify.notice import Notice

SAVE_S: Final = 5.0  # between two writes of a state that changed without news
MAX_UNSENT: Final = 1000
MAX_PROCESSES: Final = 4096  # whose names are kept
_LONGEST_AWAY_S: Final = 30 * 86_400.0

_log = logging.getLogger(__name__)


class IncidentBook:
    """Follows the incidents of one job.

    Args:
        job, host: of which people are told.
        policy: numbers.
        now: epoch seconds: for people, and to know how long a verifier was away.
        clock: seconds that never jump: for durations.
        state_path: where the state is kept; it is read if it is there. `None`: nowhere.
        run: the run directory as commands should name it.
        relations: instead of all known ones.

    Raises:
        TraceError: the state cannot be read, or is that of another job.
    """

    def __init__(
        self,
        job: str,
        host: str,
        policy: Policy | None = None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        state_path: Path | None = None,
        run: str = "RUN",
        relations: Mapping[str, Relation] | None = None,
    ) -> None:
        self.job, self.state_path = job, state_path
        self.restored = False
        """Whether it carries on with the incidents of a verifier that was killed."""
        self.save_error = ""
        """Why the state could not be written the last time."""
        self._now, self._clock, self._said_now = now, clock, 0.0
        self._relations = registry() if relations is None else relations
        self._base, self._started = 0.0, clock()
        self._unsent: list[Notice] = []
        self._finished: bool | None = None
        self._processes: dict[int, str] = {}
        self._saved_at = 0.0
        upstream = {name: relation.upstream for name, relation in self._relations.items()}
        self._cases = Cases(job, host, run, policy or Policy(), upstream, self._time, lambda: self._said_now)
        self._monitor = Monitor(self._cases)
        held = read(state_path) if state_path is not None else None
        if held is not None:
            self._restore(held)

    @property
    def incidents(self) -> list[TrackedIncident]:
        """Open incidents in the order in which they began, then the latest of those that are over."""
        return [*(self._cases.open[n] for n in sorted(self._cases.open)), *reversed(self._cases.over)]

    @property
    def unsent(self) -> list[Notice]:
        """Notices that were given out, or were about to be, and not reported as `taken`."""
        return list(self._unsent)

    def taken(self) -> None:
        """The notices given out so far are safe elsewhere."""
        if self._unsent:
            self._unsent = []
            self.save()

    def joined(self, rank: int, process: str) -> None:
        """A process of the job's present life says hello.

        Where this verifier carries on for one that was killed, another process of a rank that was known tells that the job was started again
        meanwhile.
        """
        if self._processes.get(rank, process) != process:
            self.begin_life()
        if len(self._processes) < MAX_PROCESSES:
            self._processes[rank] = process

    def begin_life(self) -> None:
        """The job was started again: its steps count from 0."""
        self._processes = {}
        self._monitor.begin_life()
        self._cases.begin_life()

    def judged(
        self,
        judgements: Iterable[Judgement],
        *,
        calls: frozenset[tuple[str, str]] = frozenset(),
        ranks: int = 1,
        coords: Coords | None = None,
        now: float | None = None,
    ) -> list[Notice]:
        """Some steps were evaluated. Best called once an evaluation, with what all relations say of it.

        Args:
            judgements: what relations say of some steps, as `OnlineChecker.rounds` gives it.
            calls: pairs of functions (caller, callee) among those that violations name (`incident.callers`).
            ranks: that are recorded.
            coords: coordinates of ranks in the program's mesh, as far as they are known.
            now: epoch seconds, instead of the book's own clock.

        Returns:
            what is to be sent.
        """
        self._at(now)
        partners: dict[str, set[str]] = defaultdict(set)
        for caller, callee in calls:
            partners[caller].add(callee)
            partners[callee].add(caller)
        for verdict in by_step(judgements, self._cases.followed, self._relations):
            for failure in verdict.failures:
                around = partners.get(failure.violation.function, ())
                self._cases.failed(failure, verdict.step, ranks, coords or {}, around)
            for rule, wide in verdict.held.items():
                self._cases.held(rule, verdict.step, wide)
            self._cases.settle()
        return self._given()

    def coverage(
        self, lost: Mapping[str, int], missing_ranks: Collection[int] = (), now: float | None = None
    ) -> list[Notice]:
        """What is known of records that did not arrive.

        Args:
            lost: counters of lost records, by reason. One that is less than before began anew.
            missing_ranks: ranks of the job that were never heard.
            now: epoch seconds, instead of the book's own clock.
        """
        self._at(now)
        self._monitor.coverage(lost, missing_ranks, self._time())
        return self._given()

    def restarted(self, why: str, now: float | None = None) -> list[Notice]:
        """The verifier was not there for a while: what is known of the gap, in words."""
        self._at(now)
        self._monitor.away(why, self._time())
        return self._given()

    def killed(self, rank: int, signal: str, means: str, step: int, now: float | None = None) -> list[Notice]:
        """A signal ended a rank.

        Args:
            rank: which.
            signal: its name.
            means: in words.
            step: the one that the rank was in, as far as it said.
            now: epoch seconds, instead of the book's own clock.
        """
        self._at(now)
        self._monitor.killed(rank, signal, means, step)
        return self._given()

    def tick(self, last_heard: Mapping[int, float] | None = None, now: float | None = None) -> list[Notice]:
        """Time has passed: call it about once a second.

        Args:
            last_heard: when each rank was heard last, by the book's `clock`; without ranks that said goodbye.
                `None`: not known.
            now: epoch seconds, instead of the book's own clock.
        """
        self._at(now)
        if last_heard is not None:
            self._monitor.look(last_heard, self._clock(), self._time())
        self._cases.settle(everything=True)
        self._cases.age()
        return self._given()

    def taken_back(self, rules: Collection[str], now: float | None = None) -> list[Notice]:
        """The check of the whole run found that these rules hold: an incident of nothing else ends, others say so.

        Nobody may be woken for it any more, and nothing new is told of it but its end.
        """
        self._at(now)
        wrong = set(rules)
        for incident in [i for i in self.incidents if wrong & i.rules.keys()]:
            incident.facts = {**incident.facts, "taken back": TAKEN_BACK}
            if incident.open and wrong >= incident.rules.keys():
                incident.tier = Tier.TICKET
                self._cases.end(incident, TAKEN_BACK)
        return self._given()

    def close(self, *, finished: bool, now: float | None = None) -> list[Notice]:
        """The job ended. What fires stays so, since the job ended with it, unless the policy says otherwise.

        Args:
            finished: it ended by itself, rather than being killed.
            now: epoch seconds, instead of the book's own clock.
        """
        self._at(now)
        self._cases.settle(everything=True)
        self._monitor.close(finished=finished)
        if self._cases.policy.resolve_at_end:
            for incident in list(self._cases.open.values()):
                if incident.state is State.FIRING:
                    self._cases.end(incident, "the job ended")
        self._finished = finished
        notices = self._given()
        self.save()
        return notices

    def attach_capsule(self, key: str, path: str) -> bool:
        """The steps around an incident are kept here. Whether there is such an incident."""
        found = next((i for i in self.incidents if i.key == key), None)
        if found is not None:
            found.capsule = path
        return found is not None

    def lacks_capsule(self, key: str, why: str) -> None:
        """The steps around an incident will not be kept; nothing is said of one that has a capsule."""
        for incident in self.incidents:
            if incident.key == key and not incident.capsule:
                incident.not_kept = why

    def attach_fact(self, key: str, name: str, text: str) -> bool:
        """Something was found out about an incident besides its violations. Whether there is such an incident."""
        found = next((i for i in self.incidents if i.key == key), None)
        if found is not None:
            found.facts = {**found.facts, name: text}
        return found is not None

    def save(self) -> bool:
        """Write the state; when it cannot be, `save_error` says why, and what was written before stays."""
        if self.state_path is None:
            return False
        self._saved_at = self._clock()
        try:
            self.state_path.parent.mkdir(parents=True, exist_ok=True)
            write(self.state_path, self._snapshot())
        except OSError as error:
            if not self.save_error:
                _log.warning("incidents cannot be written to %s: %s", self.state_path, error.strerror or error)
            self.save_error = str(error.strerror or error)
            return False
        self.save_error = ""
        return True

    def _given(self) -> list[Notice]:
        notices = self._cases.teller.take()
        if self.state_path is not None:
            self._unsent = [*self._unsent, *notices][-MAX_UNSENT:]
            if notices or self._clock() - self._saved_at >= SAVE_S:
                self.save()
        return notices

    def _at(self, now: float | None) -> None:
        self._said_now = self._now() if now is None else now

    def _time(self) -> float:
        return self._base + self._clock() - self._started

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            version=VERSION,
            job=self.job,
            time=self._time(),
            wall=self._now(),
            number=self._cases.number,
            finished=self._finished,
            incidents=[*self._cases.over, *self._cases.open.values()],
            begun=self._cases.begun,
            lost=self._monitor.lost,
            counters=self._monitor.counters,
            lost_at=self._monitor.lost_at,
            unsent=self._unsent,
            processes=self._processes,
        )

    def _restore(self, held: Snapshot) -> None:
        if held.job != self.job:
            raise TraceError(
                f"{self.state_path} holds incidents of the job {held.job!r}, not of {self.job!r}",
                hint="give every job a run directory of its own",
            )
        away = min(max(0.0, self._now() - held.wall), _LONGEST_AWAY_S)
        self._base = held.time + away
        self._cases.restore(held.incidents, held.begun, held.number)
        self._monitor.lost, self._monitor.counters = held.lost, held.counters
        self._monitor.lost_at = held.lost_at
        self._unsent, self._processes = held.unsent, held.processes
        self.restored = held.finished is None
