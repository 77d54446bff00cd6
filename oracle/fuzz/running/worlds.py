"""Worlds of ranks that are forked once and stay: a fork of a process that has imported torch takes 0.1 s, a new process 10 s.

A world in which every rank raised goes on, since a new one takes a second until it is as fast; what it then says is believed if it is "ok" or again an
exception of all ranks, and asked of a fresh world if it is anything else.

There is a world of its true size for each size (sub-groups of a larger one hang as soon as a library makes groups of its own), and one
process without a group for references. A world of which some ranks raised, or which died or hung, is killed and forked anew. Ranks find each other
through a file, so that no port is ever agreed upon; they die with the process that forked them.

The process that forks must have no threads and no process group: `fit` says whether it is so.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError

TIMEOUT_S: Final = 20.0  # of a task; a scenario takes 0.05 s
GRACE_S: Final = 0.8  # that other ranks have to raise as well, once one did
MEMORY_BYTES: Final = 6 << 30  # address space a rank may add
EXHAUSTED: Final = re.compile(r"Resource temporarily unavailable|can't start new thread|Too many open files")
TASKS: Final = 2000  # of a world, then it is forked anew: libraries keep what they made
REFERENCES: Final = (0, -1)  # sizes that stand for a process without a group
STOPS: Final = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG: Final = 1
_PREFIX: Final = "proctor-fuzz-"  # of folders on the memory disk, then the pid
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
            _child(rank, self.size, theirs, self._folder, prepare, self.timeout_s)
        theirs.close()
        ours.setblocking(False)
        _parents.add(ours)
        self.pids.append(pid)
        self.ends.append(ours)
        self._rest.append(b"")

    def send(self, task: dict[str, Any], label: Any) -> None:
        """Give all ranks a task."""
        self.busy, self.started, self.answers = label, time.monotonic(), [None] * len(self.pids)
        line = msgspec.json.encode(task) + b"\n"
        for end in self.ends:
            end.setblocking(True)
            with suppress(OSError):  # a rank that died is seen when its answer is read
                end.sendall(line)
            end.setblocking(False)

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
            _kill(pid)  # while its number is still its own: what it started lives on in its group
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
            _kill(pid)
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
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        _swept(Path(shared or tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=shared))
        self._prepare, self._timeout_s = prepare, timeout_s
        self._worlds: dict[int, World] = {}
        self.forks = 0

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
                doubtful = (world.tainted and not together and not answer.well) or (world.done > 1 and answer.exhausted)
                world.tainted |= together
                if answer.ended or doubtful or (answer.raised() and not together):
                    world.kill()
                    del self._worlds[world.size]
                yield number, None if doubtful else answer


def _ended(world: World, death: str) -> Answer | None:
    """A world's answer if it is done; None if it goes on."""
    now = time.monotonic()
    seconds = now - world.started
    ranks = tuple(world.answers)
    if death:
        return Answer(ranks, death, seconds=seconds)
    if None not in ranks:
        return Answer(ranks, seconds=seconds)
    raised = [r["at"] for r in ranks if r is not None and "raised" in r]
    if raised and now - min(raised) > GRACE_S:
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


def _kill(pid: int) -> None:
    """End a rank that was not waited for yet, and what it started (a loader's workers); 0 for one that is gone."""
    for kill in (os.killpg, os.kill) if pid else ():  # it may not have come to make its group
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


def _swept(where: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in where.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def fit() -> bool:
    """Whether this process may fork ranks: one thread, no process group."""
    import torch.distributed as dist

    return threading.active_count() == 1 and not (dist.is_available() and dist.is_initialized())


def _child(rank: int, size: int, end: socket.socket, folder: Path, prepare: Callable[[], None] | None, timeout_s: float) -> None:
    """A rank, from its fork to its end; never returns."""
    code = 70
    try:
        for other in _parents:
            other.close()
        _settle(rank, folder)
        import torch
        import torch.distributed as dist

        from proctor.oracle.fuzz.running import rank as ranks

        torch.set_num_threads(1)
        if size not in REFERENCES:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s + 30))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
            ranks.keep_groups()
            if prepare is not None:
                prepare()
        lines = end.makefile("rb")
        ranks.serve(rank, max(1, size), lines.readline, end.sendall)
        code = 0
    except BaseException:  # noqa: BLE001  the log tells; the parent sees that the rank is gone
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _settle(rank: int, folder: Path) -> None:
    """What a rank needs of its process: to die with its parent, to ignore Ctrl-C, a limit, a log, a way to be asked."""
    from proctor.oracle.fuzz.running.rank import quiet

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)  # `_kill` ends what it starts with it
    with suppress(OSError):  # a machine without memory ends a rank, not the campaign
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet(folder / f"log-{rank}")
    tempfile.tempdir = str(folder)  # what programs save goes with the world
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115  open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
