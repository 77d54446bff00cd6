"""The verifier's way to people: takes notices, never blocks on a network and never raises.

`service/build.py` makes one a job, and `proctor page flush` one for what was left. In: notices of the incident book. Out: rows of the outbox (`outbox.py`), which
the senders of this process take to the receivers (`sender.py`); after a crash the next pager goes on with what it finds there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import DeliveryError, OutboxError
from proctor.verify.notice import Action, Notice
from proctor.verify.paging import state
from proctor.verify.paging.config import PageConfig
from proctor.verify.paging.gate import Gate
from proctor.verify.paging.heartbeat import Heartbeat
from proctor.verify.paging.ledger import Ledger
from proctor.verify.paging.outbox import Outbox
from proctor.verify.paging.sender import Sender
from proctor.verify.paging.store import Store
from proctor.verify.sinks import Sink
from proctor.verify.sinks._text import tidy

_MOST_SPILLED: Final = 2_000  # incidents whose notices wait in memory for the outbox
_TICK_S: Final = 1.0
_PRUNE_S: Final = 60.0
_DISK_S: Final = 15.0  # between two tries to get back to a disk that was full

log: Final = logging.getLogger("proctor.paging")


class Pager:
    """Budgets, outbox, senders and heartbeat of one job.

    Args:
        config: of `page.toml`.
        outbox_path: `RUN/verify/outbox.db`; made with its folder.
        now: epoch seconds, for people and for what outlives this process.
        clock: monotonic seconds, for what does not.
        say: told once about each trouble; to the log when absent.
        sinks: more receivers than the configuration names.
        job: what the heartbeat calls the job where `[job]` names none.
    """

    def __init__(
        self,
        config: PageConfig,
        outbox_path: str | Path,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] | None = None,
        sinks: Iterable[Sink] = (),
        job: str = "",
    ) -> None:
        self.config, self._now, self._clock = config, now, clock
        self._say = say or log.warning
        self.sinks = {**config.open_sinks(), **{sink.name: sink for sink in sinks}}
        self._store = Store(Path(outbox_path), say=self._say, busy_s=0.25)
        self._outbox, self.ledger = Outbox(self._store, now), Ledger(self._store, now)
        self._gate = Gate(config, self.sinks, self._outbox, self.ledger, now)
        self.senders = [
            Sender(sink, self._outbox, may_send=self._store.claim_sending, say=self._say, clock=clock)
            for sink in self.sinks.values()
        ]
        self.heartbeat: Heartbeat | None = None
        if config.heartbeat is not None:
            self.heartbeat = Heartbeat(
                config.heartbeat, self.sinks, config.job.name or job, say=self._say, now=now, clock=clock
            )
        self._spilled: dict[str, Notice] = {}
        self._spill_lock = threading.Lock()
        self._spilling = ""
        self.lost = 0  # notices that found neither outbox nor room in memory
        self._changes: deque[tuple[str, float]] = deque(maxlen=8)
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._pruned = self._disk_tried = clock()
        self._hurry()

    def notify(self, notice: Notice) -> None:
        """Take a notice; it is durable when this returns, unless the disk is in trouble, which is said once."""
        notice = self._furnished(notice)
        with self._spill_lock:
            if self._spilled:  # what came before goes first
                self._spill(notice)
                return
        if not self._routed(notice):
            with self._spill_lock:
                self._spill(notice)
        self._wake()

    def alive(self, text: str = "") -> None:
        """The verifier judges: call it at every step or every second. `text` says how far it is."""
        if self.heartbeat is not None:
            self.heartbeat.alive(text)

    def changed(self, summary: str) -> None:
        """A planned restart or resume: told as a change to receivers that know these; lost when they are down."""
        self._changes.append((summary, self._now()))

    def start(self) -> None:
        """Begin to send."""
        for sender in self.senders:
            sender.start()
        if self.heartbeat is not None:
            self.heartbeat.start()
        self._keeper = threading.Thread(target=self._keep, name="proctor-page-keeper", daemon=True)
        self._keeper.start()

    def close(self, timeout_s: float = 10.0, *, finished: bool = True, outlive: bool = True) -> bool:
        """Send what is due, then stop; what is left stays in the outbox.

        Args:
            timeout_s: for all of it.
            finished: the job ended in good order, so that nobody is to miss the heartbeat.
            outlive: tell once more what is not over, since nobody tells it again after this process.

        Returns:
            Whether nothing is left to send.
        """
        end = self._clock() + timeout_s
        if self._keeper is not None:
            self._hurry()  # updates and digests that would wait
            for sender in self.senders:
                sender.retry_now()
        while self._keeper is not None and self._clock() < end - timeout_s / 4 and self._due():
            self._stop.wait(0.05)
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join(max(end - self._clock(), 0.1))
        stopped = [sender.stop(max(end - self._clock(), 0.1)) for sender in self.senders]
        if self.heartbeat is not None:
            self.heartbeat.stop(finished=finished, timeout_s=max(end - self._clock(), 0.1))
        if outlive and self._keeper is not None and self._store.claim_sending():
            self._outlive([s for s, ok in zip(self.senders, stopped) if ok])
        try:
            left = self._outbox.waits() + len(self._spilled)
            self._store.close()
        except OutboxError as error:
            self._complain(error.message)
            return False
        return not left

    def tick(self) -> None:
        """What has to be done now and then: the keeper's work, public for a verifier without threads."""
        now = self._clock()
        try:
            if not self._store.durable and now - self._disk_tried > _DISK_S:
                self._disk_tried = now
                self._store.back_to_disk()
            self._unspill()
            self._store.run(lambda db: self._gate.release())
            if now - self._pruned > _PRUNE_S:
                self._pruned = now
                for text in self._outbox.prune():
                    self._say(text)
                self.ledger.prune()
        except OutboxError as error:
            self._complain(error.message)
        while self._changes:
            summary, at = self._changes.popleft()
            for sink in self.sinks.values():
                try:
                    sink.change(summary, at, self.config.job.name)
                except DeliveryError as error:
                    self._say(f"{sink.name}: a planned change was not told: {error.message}")

    def status(self) -> state.Status:
        """Counts and lists for people and metrics; empty while the outbox cannot be read."""
        troubles = {s.sink.name: s.trouble for s in self.senders if s.trouble}
        try:
            return state.status(self._store, self._now(), list(self.sinks), troubles)
        except OutboxError as error:
            return state.Status(troubles={**troubles, "outbox": error.message})

    def _routed(self, notice: Notice) -> bool:
        try:
            self._store.run(lambda db: self._gate.route(notice))
        except OutboxError as error:
            self._complain(error.message)
            return False
        if self._spilling:
            self._spilling = ""
            self._say("the outbox takes notices again")
        return True

    def _spill(self, notice: Notice) -> None:
        """The latest of each incident is enough: a resolve of what nobody was told is dropped by the outbox."""
        self._spilled.pop(notice.key, None)
        if len(self._spilled) < _MOST_SPILLED:
            self._spilled[notice.key] = notice
        else:
            self.lost += 1

    def _unspill(self) -> None:
        with self._spill_lock:
            while self._spilled:
                key = next(iter(self._spilled))
                if not self._routed(self._spilled[key]):
                    return
                del self._spilled[key]
        self._wake()

    def _furnished(self, notice: Notice) -> Notice:
        job = self.config.job
        links = dict(notice.links)
        if job.runbook:
            links = {"runbook": job.runbook.replace("{code}", notice.code or "incident"), **links}
        return tidy(msgspec.structs.replace(notice, links=links, job=notice.job or job.name))

    def _keep(self) -> None:
        while not self._stop.wait(_TICK_S):
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001  a mistake of ours must not end the paging
                self._complain(f"internal error: {type(error).__name__}: {error}")

    def _outlive(self, senders: list[Sender]) -> None:
        try:
            self._store.run(
                lambda db: db.execute("UPDATE incident SET next_at=? WHERE state='open' AND next_at IS NOT NULL", (self._now(),))
            )
            for sender in senders:
                sender.outlive()
        except OutboxError as error:
            self._complain(error.message)

    def _due(self) -> bool:
        with self._spill_lock:
            if self._spilled:
                return True
        try:
            return any(self._outbox.due(sink) is not None for sink in self.sinks.values())
        except OutboxError:
            return True

    def _hurry(self) -> None:
        try:
            self._outbox.hurry()
        except OutboxError as error:
            self._complain(error.message)

    def _wake(self) -> None:
        for sender in self.senders:
            sender.wake()

    def _complain(self, text: str) -> None:
        if text != self._spilling:
            self._spilling = text
            self._say(f"{text}; notices wait in memory")


__all__ = ["Action", "Pager"]
