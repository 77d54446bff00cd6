"""Where functions run that do not need each other: in this process, in forked ones, or on a dask cluster.

    with on_dask("tcp://10.0.0.1:8786") as spread:
        lanes.decide(reference, record, plan, spread)

Recording ranks and judging in two fields are such functions. A worker of a cluster needs the program's files and the same versions of Python, torch and Proctor.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing.connection
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from proctor.errors import OracleError, UsageError

Calls = Sequence[Callable[[], Any]]
Spread = Callable[[Calls], Iterator[Any]]
_CONNECT_S: Final = 20


def forking(jobs: int) -> Spread:
    """So many forked processes at once; with one, this process itself."""
    return functools.partial(_forked, jobs=jobs) if jobs > 1 else here


@contextmanager
def on_dask(address: str) -> Iterator[Spread]:
    """On the workers of a cluster.

    Args:
        address: of its scheduler.

    Raises:
        UsageError: dask is not installed, or there is no scheduler.
    """
    try:
        import dask.distributed as dask
    except ImportError:
        raise UsageError("dask.distributed is not installed", hint="pip install 'proctor[dask]'") from None
    cluster: Any = dask  # its functions are not typed
    try:
        client = cluster.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise UsageError(f"--dask {address}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no scheduler'}", hint="dask scheduler") from None

    def spread(calls: Calls) -> Iterator[Any]:
        waiting = [client.submit(_packed, call, pure=False, retries=0) for call in calls]
        for future in waiting:
            yield _result(future.result())

    try:
        yield spread
    finally:
        client.close()


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


def _forked(calls: Calls, jobs: int) -> Iterator[Any]:
    """Results lie in files until they are asked for: those of recordings are large."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="proctor-prove-") as name:
        folder = Path(name)

        def one(number: int) -> None:
            (folder / str(number)).write_bytes(_packed(calls[number]))

        waiting = list(range(len(calls)))
        running: dict[int, Any] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                process = context.Process(target=one, args=(waiting.pop(0),))
                process.start()
                running[process.sentinel] = process
            for ended in multiprocessing.connection.wait(list(running)):
                assert isinstance(ended, int)
                running.pop(ended).join()
        for number in range(len(calls)):
            path = folder / str(number)
            if not path.exists():
                raise OracleError("a process that records or judges ended early", hint="it may lack memory")
            yield _result(path.read_bytes())
            path.unlink()


__all__ = ["Calls", "Spread", "forking", "here", "on_dask", "uncollected"]
