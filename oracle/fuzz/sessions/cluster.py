"""A campaign on a dask cluster (extra `proctor[dask]`): `proctor oracle fuzz --dask ADDRESS`.

Each worker of the cluster has one piece at a time: some models, for `PIECE_S` seconds. It says each pair, each finding and what it looks into as soon as it has it, so a worker that is
lost costs the pair that it was at; the pairs that it had not come to are given to another one. This process draws nothing and forks nothing: it deals pieces, writes the journal, and passes
findings on. What comes back is JSON that is checked (`relay.checked`); scripts are written here.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from proctor.dask_client import connected, workers_of
from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE
from proctor.oracle.fuzz.search.campaign import INPUTS
from proctor.oracle.fuzz.search.findings import Known
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.piece import Carried, Piece, Told
from proctor.oracle.fuzz.sessions.relay import END_S, LATE_S, News, checked, deliver, run_piece
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.sessions.session import Limits, Tell, confirmed, heading, held, setting_words

PIECE_S: Final = 120.0  # of a piece; importing takes its process some 10 s
MODELS: Final = 12  # of a piece at most
HELD: Final = 4000  # settings that a piece is told of
LOST: Final = 2  # workers that pairs may cost, and pieces in a row that a worker may fail at
GONE: Final = 3  # looks at the cluster
_CONNECT_S: Final = 20
_POLL_S: Final = 0.3
_LEAST_S: Final = 1.0  # that a piece is begun for


def run(journal: Journal, asked: Asked, limits: Limits, known: list[Known], tell: Tell, address: str) -> bool:
    """As `session.run`, on the cluster at an address.

    Raises:
        UsageError: dask is not installed, or there is no scheduler.
        OracleError: the scheduler is gone.
    """
    end = time.monotonic() + limits.budget_s
    with connected(address, _CONNECT_S) as client:
        if not confirmed(journal, asked, tell):
            return True
        interrupted = Cluster(client, journal, asked, limits, known, tell).run(end)
    return interrupted or not confirmed(journal, asked, tell)  # what a worker has found that ended before it ran the script


class Numbers:
    """Pairs that are still to be run, a model's together.

    Args:
        done: that were run.
        most: of the campaign; None for no end.
    """

    def __init__(self, done: Iterable[int], most: int | None) -> None:
        self._done, self._most, self._model = set(done), most, 0
        self._back: set[int] = set()
        self._lost: Counter[int] = Counter()

    def take(self, models: int) -> tuple[int, ...]:
        """Pairs of so many models at most; those that came back first."""
        found = sorted(self._back)[: models * INPUTS]
        self._back.difference_update(found)
        while not found and self.more:
            first, last = self._model * INPUTS, (self._model + models) * INPUTS
            self._model += models
            found = [n for n in range(first, last if self._most is None else min(last, self._most)) if n not in self._done]
        return tuple(found)

    @property
    def more(self) -> bool:
        """Whether some are left."""
        return bool(self._back) or self._most is None or self._model * INPUTS < self._most

    def ran(self, number: int) -> bool:
        """A pair was run; False if it had been before."""
        new = number not in self._done
        self._done.add(number)
        self._back.discard(number)
        return new

    def back(self, numbers: Iterable[int], *, lost: bool = False) -> list[int]:
        """Those of a piece that were not run are run by another one; gives those that are left out, because they cost too many workers."""
        left = [n for n in numbers if n not in self._done]
        self._lost.update(left if lost else ())
        out = [n for n in left if self._lost[n] >= LOST]
        self._back.update(n for n in left if self._lost[n] < LOST)
        return out


class Cluster:
    """A campaign while it runs on a cluster."""

    def __init__(self, client: Any, journal: Journal, asked: Asked, limits: Limits, known: list[Known], tell: Tell) -> None:
        self._client, self._journal, self._asked, self._limits, self._known, self._tell = client, journal, asked, limits, known, tell
        self._name = f"proctor-fuzz-{uuid.uuid4().hex[:12]}"
        self._numbers = Numbers((p.number for _, p in journal.pairs()), limits.pairs)
        self._held = list(held(journal))
        self._findings = {f.id: Carried(f) for f in journal.findings()}
        self._old = set(self._findings)
        self._running: dict[str, tuple[int, tuple[int, ...], Any]] = {}  # worker → piece, its pairs, its future
        self._absent: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()  # pieces of a worker, one after the other
        self._claims: dict[int, tuple[str, ...]] = {}
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._post = Post(client, self._name)
        self._pieces = self._pairs = 0
        self._waits = False

    def run(self, end: float) -> bool:
        """Until the budget is spent; returns whether it was interrupted."""
        self._client.subscribe_topic(self._name, lambda event: self._heard.put(event[1]))
        try:
            while self._running or (time.monotonic() < end and self._numbers.more):
                self._round(end)
                if time.monotonic() > end + LATE_S + END_S:
                    break
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            return True
        finally:
            with suppress(KeyboardInterrupt):  # a second one does not wait for pieces
                self._stop()
        return False

    def _round(self, end: float) -> None:
        workers = self._workers()
        while not self._heard.empty():
            self._take(self._heard.get())
        for worker, (number, _, future) in list(self._running.items()):
            if future.done():
                self._finished(worker, future)
            elif self._missing(worker, worker in workers):
                future.cancel()
                self._over(worker, f"piece {number}: its worker {worker} was lost", lost=True)
        for worker in workers:
            if worker not in self._running and self._failed[worker] < LOST and end - time.monotonic() > _LEAST_S and self._numbers.more:
                self._begin(worker, len(workers), end)
        self._post.news(News({key: n for n, keys in self._claims.items() for key in keys}, tuple(c.finding for c in self._findings.values() if c.finding.id not in self._old)))

    def _missing(self, worker: str, here: bool) -> bool:
        """Whether a worker was not there `GONE` times in a row."""
        self._absent[worker] = 0 if here else self._absent[worker] + 1
        return self._absent[worker] >= GONE

    def _workers(self) -> list[str]:
        try:
            found = workers_of(self._client)
        except (OSError, TimeoutError, RuntimeError) as e:
            raise OracleError(f"--dask: the scheduler is gone: {type(e).__name__}", hint=f"--resume {self._journal.path}") from None
        if self._client.status not in ("running", "connecting"):
            raise OracleError("--dask: the scheduler is gone", hint=f"--resume {self._journal.path}")
        if not found and not self._waits:
            self._tell("the cluster has no workers yet: dask worker ADDRESS --nthreads 1")
        self._waits = not found
        return found

    def _begin(self, worker: str, workers: int, end: float) -> None:
        left = self._limits.pairs
        share = MODELS if left is None else min(MODELS, max(1, -(-left // INPUTS) // workers))
        numbers = self._numbers.take(share)
        if not numbers:
            return
        piece = Piece(
            self._asked, numbers, min(PIECE_S, end - time.monotonic()), self._limits.timeout_s, tuple(self._known), tuple(c.finding for c in self._findings.values()), tuple(self._held[-HELD:])
        )
        text = msgspec.json.encode(piece).decode()
        key = f"{self._name}-{self._pieces}"
        future = self._client.submit(run_piece, self._name, self._pieces, text, key=key, workers=[worker], allow_other_workers=False, pure=False, retries=0)
        self._running[worker] = self._pieces, numbers, future
        self._pieces += 1

    def _finished(self, worker: str, future: Any) -> None:
        try:
            told = self._take(future.result())
        except (KeyboardInterrupt, OracleError):
            raise
        except Exception as e:  # noqa: BLE001  whatever a worker, or dask, raises
            self._failing(worker, f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}")
            return
        why = "it says what is no piece" if told is None else told.ended
        if why:
            self._failing(worker, why)
        else:
            self._failed[worker] = 0
            self._over(worker)

    def _failing(self, worker: str, why: str) -> None:
        self._failed[worker] += 1
        more = "; it gets no more" if self._failed[worker] >= LOST else ""
        self._over(worker, f"piece {self._running[worker][0]} on {worker}: {why}{more}", lost=True)

    def _over(self, worker: str, said: str = "", *, lost: bool = False) -> None:
        number, numbers, _ = self._running.pop(worker)
        self._claims.pop(number, None)
        out = self._numbers.back(numbers, lost=lost)
        if said:
            self._tell(said)
        if out:
            self._tell(f"pairs {out[0]} to {out[-1]} are left out: {LOST} workers were lost with them")

    def _take(self, text: str) -> Told | None:
        """Write down what a piece said; None where that is not understood."""
        try:
            told = msgspec.json.decode(text, type=Told)
            for carried in told.findings:
                checked(carried.finding)
        except (OracleError, *UNREADABLE) as e:
            self._tell(f"a worker says what is not understood: {e}"[:300])
            return None
        if told.ended is None and any(told.piece == number for number, _, _ in self._running.values()):
            self._claims[told.piece] = told.claims
        for carried in told.findings:
            self._found(carried)
        for pair in told.pairs:
            if self._numbers.ran(pair.number):
                self._journal.add(0, pair)
                self._held += [row.setting for row in pair.rows]
                self._pairs += 1
        new = sum(not c.finding.known for c in self._findings.values())
        self._tell(f"pair {self._pairs} of this run: {len(self._running)} workers, {new} findings")
        return told

    def _found(self, carried: Carried) -> None:
        """A finding, or one that two workers made: the first that is confirmed stays."""
        finding = carried.finding
        before = self._findings.get(finding.id)
        if before is not None and (before.finding.confirmed or not finding.confirmed):
            return
        self._findings[finding.id] = carried
        self._journal.put(finding, script_of(finding, heading(self._asked)), carried.output)
        if finding.confirmed:
            mark = "known" if finding.known else "new" if finding.confirmed == "yes" else "not confirmed"
            self._tell(f"{mark} {finding.id}: {setting_words(finding)}: {finding.outcome.why[:200]}")

    def _stop(self) -> None:
        """Pieces that still run end, and say what they have; a second Ctrl-C does not wait for them."""
        if self._running:
            self._post.news(News(stop=True))
            end = time.monotonic() + END_S + 10
            while time.monotonic() < end and not all(future.done() for _, _, future in self._running.values()):
                time.sleep(_POLL_S)
            for _, _, future in self._running.values():
                with suppress(Exception):  # it is gone with its worker
                    if future.done():
                        self._take(future.result())
            self._client.cancel([future for _, _, future in self._running.values()])
        while not self._heard.empty():
            self._take(self._heard.get())
        self._post.close()


class Post:
    """Brings news to all workers, from a thread of its own: a worker that does not answer must not hold up the campaign."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name
        self._waiting: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._last = News()
        threading.Thread(target=self._deliver, daemon=True, name="proctor-fuzz-post").start()

    def news(self, news: News) -> None:
        """Send it if it is news; of findings those that were not sent before.

        Args:
            news: all claims, all findings.
        """
        before = {msgspec.json.encode(f) for f in self._last.findings}
        fresh = tuple(f for f in news.findings if msgspec.json.encode(f) not in before)
        if fresh or news.claims != self._last.claims or news.stop:
            self._waiting.put(News(news.claims, fresh, news.stop))
            self._last = news

    def close(self) -> None:
        """No more."""
        self._waiting.put(None)

    def _deliver(self) -> None:
        while (news := self._waiting.get()) is not None:
            with suppress(Exception):  # a worker that is not told does at worst what another one does as well
                self._client.run(deliver, self._name, msgspec.json.encode(news).decode(), on_error="ignore")
