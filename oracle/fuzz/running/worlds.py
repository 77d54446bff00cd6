"""Worlds of ranks that are forked once and stay: a fork of a process that has imported torch takes 0.1 s, a new process 10 s.

A world in which ranks raised goes on, since a new one takes seconds until it is as fast; where others wait for them, all meet anew (`revive`). What it then says is
believed if it is "ok", an exception of all ranks, one that a fresh world has told before, or a difference that decides nothing (`settled`); anything else is asked of a fresh world.

There is a world of its true size for each size (sub-groups of a larger one hang as soon as a library makes groups of its own), and one
process without a group for references. A world of which a rank died or hung is killed and forked anew. Ranks find each other
through a file, so that no port is ever agreed upon; they die with the process that forked them.

The process that forks must have no threads and no process group: `fit` says whether it is so.
"""

from __future__ import annotations

import importlib
import os
import re
import select
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.running.child import MORE_S, STOPS, child

TIMEOUT_S: Final = 20.0  # of a task; a scenario takes 0.05 s
GRACE_S: Final = 0.8  # that other ranks have to raise as well, once one did
GONE: Final = re.compile(r"Connection (reset|closed) by peer|Socket closed|Broken pipe")  # what a rank raises whose peer is about to die
GONE_S: Final = 5.0  # that such a peer has to die, where nothing else was raised: its last words take a moment
REVIVE_S: Final = 4.0  # for ranks to leave their groups and to meet again; it takes 0.05 s. A rank that waits in a file (`new_group`) is not told
EXHAUSTED: Final = re.compile(r"Resource temporarily unavailable|can't start new thread|Too many open files")
TASKS: Final = 2000  # of a world, then it is forked anew: libraries keep what they made
PREFIX: Final = "proctor-fuzz-"  # of folders on the memory disk and of Keras, then the pid
_parents: set[socket.socket] = set()  # our ends of all worlds; a child closes them


class Answer(msgspec.Struct, frozen=True):
    """What came of a task.

    Attributes:
        ranks: each rank's answer, or None.
        ended: "" if all answered; "timeout", or how a rank died.
        stacks: what each rank waited in when time ran out.
        seconds: from the task's start to the last answer.
    """

    ranks: tuple[dict[str, Any] | None, ...]
    ended: str = ""
    stacks: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        """Whether all ranks answered and found nothing."""
        return not self.ended and all(r is not None and "raised" not in r and not r.get("differences") for r in self.ranks)

    @property
    def exhausted(self) -> bool:
        """Whether a rank was refused threads, memory or files: libraries leave groups behind, and the machine has its own limits."""
        return any(EXHAUSTED.search(r["message"]) for r in self.raised())

    def raised(self) -> list[dict[str, Any]]:
        """Exceptions, the first to come first."""
        found = [r for r in self.ranks if r is not None and "raised" in r]
        return [r["raised"] for r in sorted(found, key=lambda r: r.get("at", 0.0))]


class World:
    """One world. `prepare` is called in each rank before its first task (a mutation, in the self-test)."""

    def __init__(self, size: int, folder: Path, prepare: Callable[[], None] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.done = 0
        self.tainted = False
        self.settled = False
        self.revived = 0
        self.started = time.monotonic()
        self.answers: list[dict[str, Any] | None] = []
        self.busy: Any = None
        self._folder = Path(tempfile.mkdtemp(prefix=f"world-{size}-", dir=folder))
        self.pids: list[int] = []
        self.ends: list[socket.socket] = []
        self._rest: list[bytes] = []
        for rank in range(max(1, size)):
            self._fork(rank, prepare)

    def _fork(self, rank: int, prepare: Callable[[], None] | None) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            child(rank, self.size, theirs, _parents, self._folder, prepare, self.timeout_s)
        theirs.close()
        ours.setblocking(False)
        _parents.add(ours)
        self.pids.append(pid)
        self.ends.append(ours)
        self._rest.append(b"")

    def send(self, task: dict[str, Any], label: Any) -> None:
        """Give all ranks a task."""
        self.settled = bool(task.get("settled"))
        self.busy, self.started, self.answers = label, time.monotonic(), [None] * len(self.pids)
        line = msgspec.json.encode(task) + b"\n"
        for end in self.ends:
            end.setblocking(True)
            with suppress(OSError):  # a rank that died is seen when its answer is read
                end.sendall(line)
            end.setblocking(False)

    def revive(self) -> bool:
        """Bring ranks of which some raised together again, in groups of their own; False if it does not work within `REVIVE_S`."""
        end = time.monotonic() + REVIVE_S
        left = set(range(len(self.pids)))
        while left:  # those that wait for a rank answer once it is gone
            for rank in [r for r in left if self.answers[r] is not None]:
                self._tell(rank, {"let_go": True})
                left.discard(rank)
            if left and not self._heard(end, some=left):
                return False
        if not self._heard(end):
            return False
        self.revived += 1
        for rank in range(len(self.pids)):
            self._tell(rank, {"join": str(self._folder / f"store-{self.revived}"), "timeout_s": self.timeout_s + MORE_S})
        return self._heard(end)

    def _tell(self, rank: int, task: dict[str, Any]) -> None:
        self.answers[rank] = None
        with suppress(OSError):  # that it is gone is seen when it is read
            self.ends[rank].sendall(msgspec.json.encode(task) + b"\n")

    def _heard(self, end: float, some: set[int] | None = None) -> bool:
        """Wait until all ranks, or one of `some`, have answered."""
        while True:
            missing = [r for r, answer in enumerate(self.answers) if answer is None]
            if not missing or (some is not None and not some <= set(missing)):
                return True
            if time.monotonic() > end:
                return False
            select.select([self.ends[r] for r in missing], [], [], 0.05)
            if any(self.read(r) for r in missing):
                return False

    def read(self, rank: int) -> str:
        """Read what a rank has written. Returns how it died, or ""."""
        with suppress(BlockingIOError):
            try:
                data = self.ends[rank].recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                return self._death(rank)
            self._rest[rank] += data
            if self._rest[rank].endswith(b"\n"):
                answer = msgspec.json.decode(self._rest[rank])
                self._rest[rank], self.answers[rank] = b"", {**answer, "at": time.monotonic()}
        return ""

    def _death(self, rank: int) -> str:
        """How a rank ended, and what it printed last."""
        pid, status = self.pids[rank], 0
        with suppress(ChildProcessError):
            for _ in range(50):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break
                time.sleep(0.01)
            end_process(pid)  # while its number is still its own: what it started lives on in its group
            status = os.waitpid(pid, 0)[1]
        self.pids[rank] = 0
        said = self._printed(rank)
        how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"
        return f"rank {rank} died: {how}{f': {said}' if said else ''}"

    def _printed(self, rank: int) -> str:
        with suppress(OSError):
            lines = (self._folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()
            telling = [line for line in lines if "what():" in line or "rror" in line]
            return (telling or lines or [""])[-1].strip()[:300]
        return ""

    def stacks(self) -> tuple[str, ...]:
        """What each rank is in, innermost call first."""
        for pid in self.pids:
            with suppress(OSError):
                if pid:
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        found = []
        for rank in range(len(self.pids)):
            with suppress(OSError):
                found.append((self._folder / f"stack-{rank}").read_text(errors="replace")[:3000])
        return tuple(found)

    def kill(self) -> None:
        """End all ranks at once and wait for them; leaves no zombie, no file."""
        for pid in self.pids:
            end_process(pid)
        for pid in self.pids:
            with suppress(OSError):
                if pid:
                    os.waitpid(pid, 0)
        for end in self.ends:
            _parents.discard(end)
            end.close()
        self.pids, self.ends = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


class Worlds:
    """A world of each size, forked when it is first needed; use as a context manager."""

    def __init__(self, *, prepare: Callable[[], None] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        if not fit():
            raise OracleError("worlds cannot be forked: this process has threads or a process group", hint="run the campaign in a process of its own")
        for name in ("kept", "rank"):  # each rank would load them by itself
            importlib.import_module(f"proctor.oracle.fuzz.running.{name}")
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        swept(Path(shared or tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=shared))
        self._prepare, self._timeout_s = prepare, timeout_s
        self._worlds: dict[int, World] = {}
        self.forks = 0
        self._vouched: set[tuple[str, str, str]] = set()  # exceptions that fresh worlds told

    def __enter__(self) -> Worlds:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """Kill all ranks and remove all files."""
        for world in self._worlds.values():
            world.kill()
        self._worlds.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, size: int, task: dict[str, Any]) -> Answer:
        """One task."""
        return next(self.run_all([(size, task)]))[1]

    def run_all(self, tasks: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, Answer]]:
        """Tasks of all sizes, worlds of different sizes at once; gives the number of a task and its answer as they come."""
        waiting: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        given = list(tasks)
        for i, (size, task) in enumerate(given):
            waiting.setdefault(size, []).append((i, task))
        while waiting or any(w.busy is not None for w in self._worlds.values()):
            for size in [s for s in waiting if self._free(s)]:
                i, task = waiting[size].pop(0)
                if not waiting[size]:
                    del waiting[size]
                self._world(size).send({**task, "id": i}, i)
            for number, answer in self._wait():
                if answer is None:  # a world that had raised before is not believed
                    waiting.setdefault(given[number][0], []).insert(0, (number, given[number][1]))
                else:
                    yield number, answer

    def _doubts(self, world: World, answer: Answer) -> bool:
        """Whether an answer of a world in which something raised before, other than one exception of all ranks, is to be asked of a fresh one."""
        if answer.ended not in ("", "raised"):
            return True
        if answer.raised():
            return _exception(answer) not in self._vouched
        return not answer.well and not world.settled

    def _free(self, size: int) -> bool:
        return size not in self._worlds or self._worlds[size].busy is None

    def _world(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is not None and world.done >= TASKS:
            world.kill()
            world = None
        if world is None:
            with undisturbed():
                world = self._worlds[size] = World(size, self.folder, self._prepare, self._timeout_s)
            self.forks += 1
        world.done += 1
        return world

    def _wait(self) -> Iterator[tuple[int, Answer | None]]:
        """Until something is done; worlds that are done with trouble are gone after it. None: to be asked again."""
        busy = [w for w in self._worlds.values() if w.busy is not None]
        with selectors.DefaultSelector() as selector:
            for world in busy:
                for rank, end in enumerate(world.ends):
                    if world.answers[rank] is None:
                        selector.register(end, selectors.EVENT_READ, (world, rank))
            deaths = {}
            for key, _ in selector.select(timeout=0.1):
                world, rank = key.data
                death = world.read(rank)
                if death:
                    deaths[world.size] = death
        for world in busy:
            answer = _ended(world, deaths.get(world.size, ""))
            if answer is not None:
                number, world.busy = world.busy, None
                together = not answer.ended and len(answer.raised()) == len(answer.ranks)
                doubtful = (world.tainted and not together and self._doubts(world, answer)) or (world.done > 1 and answer.exhausted)
                apart = bool(answer.raised()) and not together and answer.ended in ("", "raised")
                if not world.tainted and answer.raised():
                    self._vouched.add(_exception(answer))
                world.tainted |= together or apart
                if doubtful or (answer.ended and not apart) or (apart and not world.revive()):
                    world.kill()
                    del self._worlds[world.size]
                yield number, None if doubtful else answer


def _exception(answer: Answer) -> tuple[str, str, str]:
    """What the first rank that raised raised, without data."""
    from proctor.oracle.fuzz.running.rank import plain_message

    first = answer.raised()[0]
    return first["type"], plain_message(first["message"]), first["where"]


def _ended(world: World, death: str) -> Answer | None:
    """A world's answer if it is done; None if it goes on."""
    now = time.monotonic()
    seconds = now - world.started
    ranks = tuple(world.answers)
    if death:
        return Answer(ranks, death, seconds=seconds)
    if None not in ranks:
        return Answer(ranks, seconds=seconds)
    raised = [r for r in ranks if r is not None and "raised" in r]
    grace = GONE_S if all(GONE.search(r["raised"]["message"]) for r in raised) else GRACE_S
    if raised and now - min(r["at"] for r in raised) > grace:
        return Answer(ranks, "raised", seconds=seconds)
    if seconds > world.timeout_s:
        return Answer(ranks, "timeout", world.stacks(), seconds)
    return None


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until a fork is done: what a handler raises in functions that Python calls at a fork (logging has one) is printed and lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_process(pid: int) -> None:
    """End a process that was not waited for yet, and its group (of a rank, a loader's workers); 0 for one that is gone."""
    for kill in (os.killpg, os.kill) if pid else ():  # it may lead no group, or not yet
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


def swept(where: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in where.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def fit() -> bool:
    """Whether this process may fork ranks: one thread, no process group."""
    import torch.distributed as dist

    return threading.active_count() == 1 and not (dist.is_available() and dist.is_initialized())
