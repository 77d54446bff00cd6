"""Where functions run that do not need each other: in this process, in forked ones, or on a dask cluster.

    with on_dask("tcp://10.0.0.1:8786") as spread:
        lanes.decide(reference, record, plan, spread)

Recording ranks and judging in two fields are such functions, and so is the proof of a small program, which goes on beside all of them. A worker of a cluster needs the program's
files and the same versions of Python, torch and Proctor.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
import pickle
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from proctor.dask_client import connected
from proctor.errors import OracleError

Calls = Sequence[Callable[[], Any]]
Spread = Callable[[Calls], Iterator[Any]]
_CONNECT_S: Final = 20
_END_S: Final = 10  # that a process has to end what it started itself


class Beside:
    """A function that runs in a forked process while other work goes on."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="proctor-prove-")
        self._path = Path(self._folder.name) / "found"
        self.process = _started(call, self._path)

    def found(self) -> Any | None:
        """What it returns, as soon as it does; None where it raised, or its process ended early."""
        self.process.join()
        try:
            done, found = pickle.loads(self._path.read_bytes())  # written by `_packed`, in a process of our own
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return found if done else None

    def end(self) -> None:
        """It is not asked for."""
        _ended(self.process)
        self._folder.cleanup()


class Forking:
    """So many forked processes at once, this one counted while it takes a result.

    Args:
        jobs: what runs `beside` is one of them.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._beside: list[Beside] = []

    @contextmanager
    def beside(self, call: Callable[[], Any]) -> Iterator[Beside | None]:
        """Run a function beside all else; it is ended where this does. None where there is no process to spare."""

        def alone() -> Any:
            self.jobs = 1  # in its own process
            return call()

        try:
            other = Beside(alone)
        except OSError:  # no more processes, or no room
            yield None
            return
        self._beside.append(other)
        try:
            yield other
        finally:
            self._beside.remove(other)
            other.end()

    def __call__(self, calls: Calls) -> Iterator[Any]:
        """Results in order, each as soon as it is there. They lie in files until they are asked for: those of recordings are large."""
        if self.jobs == 1:
            yield from here(calls)
            return
        with tempfile.TemporaryDirectory(prefix="proctor-prove-") as name:
            waiting, running = deque(range(len(calls))), dict[int, Any]()
            done: set[int] = set()
            try:
                for number in range(len(calls)):
                    path = Path(name) / str(number)
                    while number not in done:
                        others = [other.process.sentinel for other in self._beside if other.process.is_alive()]
                        while waiting and len(running) < self.jobs - len(others):
                            process = _started(calls[waiting[0]], Path(name) / str(waiting[0]))
                            running[process.sentinel] = process, waiting.popleft()
                        for sentinel in multiprocessing.connection.wait([*running, *others]):
                            if sentinel in running:
                                process, ended = running.pop(sentinel)
                                process.join()
                                done.add(ended)
                    if not path.exists():
                        raise OracleError("a process that records or judges ended early", hint="it may lack memory")
                    found = _result(path.read_bytes())
                    path.unlink()
                    yield found
                    del found
            finally:
                for process, _ in running.values():
                    _ended(process)


def forking(jobs: int) -> Spread:
    """So many forked processes at once; with one, this process itself."""
    return Forking(jobs) if jobs > 1 else here


@contextmanager
def on_dask(address: str) -> Iterator[Spread]:
    """On the workers of a cluster.

    Args:
        address: of its scheduler.

    Raises:
        UsageError: dask is not installed, or there is no scheduler.
    """
    with connected(address, _CONNECT_S) as client:

        def spread(calls: Calls) -> Iterator[Any]:
            waiting = [client.submit(_packed, call, pure=False, retries=0) for call in calls]
            for future in waiting:
                yield _result(future.result())

        yield spread


def here(calls: Calls) -> Iterator[Any]:
    """One after the other, in this process."""
    yield from (call() for call in calls)


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing looks for cycles, of which tapes have none: looking at millions of operations again and again takes long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _packed(call: Callable[[], Any]) -> bytes:
    """What a function returns or raises."""
    with uncollected():
        try:
            return pickle.dumps((True, call()), protocol=5)
        except Exception as error:  # noqa: BLE001 - it is raised again where it was asked for
            return pickle.dumps((False, error), protocol=5)


def _result(packed: bytes) -> Any:
    done, found = pickle.loads(packed)  # written by `_packed`, in a process of our own
    if not done:
        raise found
    return found


def _started(call: Callable[[], Any], path: Path) -> Any:
    """A forked process that writes what a function gives, as a whole or not at all."""

    def run() -> None:
        import torch

        torch.set_num_threads(1)  # threads of the pool are not forked, and an operation that asks for them would wait for ever
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(_packed(call))
        part.replace(path)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


def _leave(number: int, frame: Any) -> None:
    """So that what was begun, such as a program that is recorded, is ended as well."""
    raise SystemExit(128 + number)


def _ended(process: Any) -> None:
    if process.is_alive():
        process.terminate()
        process.join(_END_S)
        if process.is_alive():
            process.kill()
    process.join()


__all__ = ["Beside", "Calls", "Forking", "Spread", "forking", "here", "on_dask", "uncollected"]
