"""The job as the verifier knows it: its processes, their records, the rules that fit it, and what was lost.

`verifier` gives it the events of the inbox, one after another. A process that joins is put on the roll and may begin a new
life of the job; rows go to the checker of the present life; gaps are filled from the run's files, or count as lost.
Promise: whatever a process sends, only its own records become unknown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from proctor.errors import TraceError
from proctor.invariants.files import read_file
from proctor.invariants.fit import misfit, said
from proctor.invariants.pack import Pack
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.live.glances import Glances
from proctor.verify.live.online import OnlineChecker
from proctor.verify.live.pace import Pace
from proctor.verify.metrics import Metrics
from proctor.verify.service.membership import Roll
from proctor.verify.service.overhead import Overheads
from proctor.verify.transport.fill import fill
from proctor.verify.transport.inbox import Event, Gap, Glanced, Joined, Left, Rows, Told
from proctor.verify.view.events import CoverageEvent, EventLog

_MAX_BYTES: Final = 16 << 20  # of run.json, process.json
_MAX_PROCESSES: Final = 1 << 16
_TRAINED: Final = 8  # steps of a rank, after which a rank that has not come is missing


@dataclass
class Job:
    """Arguments as those of `Verifier`.

    Args:
        finish: judges what waits, before a new life begins.
        pace: of rounds that are not urgent.
        hang_after_s: as of `OnlineChecker`.
    """

    run: Path
    packs: Sequence[Pack]
    pack_names: Sequence[str]
    fitting: bool
    book: IncidentBook
    metrics: Metrics
    log: EventLog
    say: Callable[[str], None]
    clock: Callable[[], float]
    finish: Callable[[], None]
    pace: Callable[[], Pace]
    hang_after_s: float
    look: Callable[[int], None] = lambda step: None
    """Asks all ranks to look at the next steps in full; called with the step that it is for."""
    lost: dict[str, int] = field(default_factory=dict)
    """Records, by reason."""
    before: int = 0
    """Steps judged in earlier lives of the job."""
    patience: float = 0.0
    """Until when, by `clock`, records that are not in the files yet are waited for."""

    _program: str = ""
    _folders: dict[str, str] = field(default_factory=dict)
    """The last process that wrote into each."""

    def __post_init__(self) -> None:
        self.roll = Roll(self.clock)
        self.overheads = Overheads()
        self.glances = Glances()
        self.checker = self._fresh()

    @property
    def program(self) -> str:
        """Name of the job's program; "" while nobody has written it down."""
        if not self._program:
            with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
                self._program = str(json.loads(read_file(self.run / "run.json", _MAX_BYTES)).get("program", ""))
        return self._program

    def take(self, event: Event) -> None:
        """What a process says."""
        if isinstance(event, Joined) and self.roll.begins(event):
            self._again()
        peer = self.roll.hear(event.process)
        if peer is None:
            return  # it belongs to an earlier life of the job
        live = self.checker.live
        try:
            match event:
                case Joined():
                    self._join(event)
                case Rows():
                    live.add(event.process, event.records, reached=event.reached)
                case Told():
                    peer.tell(event.info)
                    live.member(event.process).tell(event.info)
                    self._hear_cost(event.process, event.info)
                case Glanced():
                    if (parted := self.glances.hear(event.process, event.rows)) is not None:
                        self.look(parted[0])
                case Gap():
                    self._fill(event)
                case Left():
                    self.glances.leave(event.process)
                    self.roll.leave(event)
                    live.member(event.process).gone = True
        except TraceError as e:
            self.count("refused", 1)
            self.say(str(e))

    def _again(self) -> None:
        """The job was started again: steps count from 0."""
        self.finish()
        self.before += self.checker.judged + 1
        self.roll.begin()
        self.book.begin_life()
        self.glances = Glances()
        self.checker = self._fresh()

    def _join(self, event: Joined) -> None:
        self.roll.join(event)
        rank = self.roll.peers[event.process].rank
        if rank >= 0:
            self.book.joined(rank, event.process)
        if self.fitting:
            self._fit(event.info)
        self.checker.live.add(event.process, {}, event.info)
        self.checker.live.member(event.process).gone = False
        self._folders[event.folder] = event.process
        self._hear_cost(event.process, event.info)

    def _hear_cost(self, process: str, info: Mapping[str, Any]) -> None:
        self.metrics.overhead(self.overheads.hear(process, info))

    def read_costs(self) -> None:
        """What processes say of their cost in the run's files: the last word of one that had ended before the verifier was there did not come by itself."""
        with contextlib.suppress(OSError):
            for folder in islice((self.run / "procs").iterdir(), _MAX_PROCESSES):
                with contextlib.suppress(OSError, ValueError, RecursionError):
                    info = json.loads(read_file(folder / "process.json", _MAX_BYTES))
                    if isinstance(info, dict):
                        self._hear_cost(self._folders.get(folder.name, folder.name), info)

    def _fill(self, gap: Gap) -> None:
        """Records are missing: they are read from the run's files, or count as lost."""
        member = self.checker.live.member(gap.process)
        found = fill(self.run, gap, wait_s=0.0 if member.gone else max(0.0, self.patience - self.clock()))
        if found.records:
            self.checker.live.add(gap.process, found.records)
        if found.missing:
            member.lose(found.missing)
            self.count("gap", found.missing)
            self.say(f"{found.missing} records of {gap.process} did not arrive ({found.why}); the steps around them are unknown")

    def _fresh(self) -> OnlineChecker:
        return OnlineChecker(self.packs, run=str(self.run), program=self.program, pace=self.pace(), hang_after_s=self.hang_after_s)

    def _fit(self, info: Mapping[str, Any]) -> None:
        """Of the shipped packs keep those that are for what this job uses."""
        versions = said(info)
        kept = [pack for pack in self.packs if not misfit(pack.requires, versions)]
        self.fitting = False
        if len(kept) < len(self.packs):
            self.pack_names = [n for n, pack in zip(self.pack_names, self.packs, strict=False) if any(pack is one for one in kept)]
            self.packs = kept
            live, self.checker = self.checker.live, self._fresh()
            self.checker.live = live
        rules = sum(len(pack.invariants) for pack in kept)
        self.say(f"watching with {rules} rules of {len(kept)} packs that fit this job")

    def missing(self) -> Collection[int]:
        """Ranks that have not come, once another one has trained for a while."""
        members = [m for m in self.checker.live.members.values() if m.trains]
        if not members or max(m.reached for m in members) < _TRAINED:
            return ()
        return self.roll.missing(max(m.world for m in members))

    def count(self, reason: str, number: int) -> None:
        """Records are lost, for a reason."""
        self.lost[reason] = self.lost.get(reason, 0) + number
        self.metrics.dropped(reason.partition(":")[0], number)
        self.log.append(CoverageEvent(lost=dict(self.lost)))
