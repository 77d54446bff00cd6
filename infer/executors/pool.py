"""In a pool of processes on this machine, the default.

Processes are spawned, since a fork inherits the locks of polars' threads but not the threads (docs.pola.rs,
multiprocessing). Each worker is a pool of one, so that an item can go to the worker that has its run in memory, and a
worker that dies takes one item with it, not the others.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

from proctor.infer.executors import Item, Lost, Result, one_line


class PoolExecutor:
    """A pool of `workers` processes that share this machine's cores."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = max(1, (os.cpu_count() or 1) // workers)
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._home: dict[str, int] = {}  # worker that had a key last
        self._lock = threading.Lock()

    def map(self, fn: Callable[[Item], Result], items: Sequence[Item], keys: Sequence[str]) -> Iterator[tuple[int, Result | Lost]]:
        left = list(range(len(items)))
        done: SimpleQueue[tuple[int, Result | Lost | BaseException]] = SimpleQueue()
        stop = threading.Event()

        def work(worker: int) -> None:
            while not stop.is_set():
                i = self._take(worker, left, keys)
                if i is None:
                    return
                done.put((i, self._one(worker, fn, items[i])))

        threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in range(min(self.workers, len(items)))]
        for thread in threads:
            thread.start()
        try:
            for _ in items:
                i, result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield i, result
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._pools.clear()

    def _take(self, worker: int, left: list[int], keys: Sequence[str]) -> int | None:
        """The next item: one that this worker had before, else one that none had, else any."""
        with self._lock:
            if not left:
                return None
            i = min(left, key=lambda i: (self._home.get(keys[i], worker) != worker, keys[i] not in self._home, i))
            left.remove(i)
            self._home[keys[i]] = worker
            return i

    def _one(self, worker: int, fn: Callable[[Item], Result], item: Item) -> Result | Lost | BaseException:
        try:
            # Pickled here, where a failure has a name: inside the pool it would be a worker that died.
            blob = pickle.dumps((fn, item), protocol=5)
            result, error = self._pool(worker).submit(_run, blob).result()
        except BrokenProcessPool:
            with self._lock:
                self._pools.pop(worker).shutdown(wait=False)
            return Lost("its worker process died, often for lack of memory", died=True)
        except Exception as e:  # noqa: BLE001  whatever pickle raises of objects that it does not know
            return Lost(one_line(e))
        return result if error is None else error

    def _pool(self, worker: int) -> ProcessPoolExecutor:
        with self._lock:
            pool = self._pools.get(worker)
            if pool is None:
                pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (self._threads,))
                self._pools[worker] = pool
            return pool


def _start(threads: int) -> None:
    # Before the first use of polars in this process, which is when it reads this.
    os.environ["POLARS_MAX_THREADS"] = str(threads)


def _run(blob: bytes) -> tuple[Any, BaseException | None]:
    fn, item = pickle.loads(blob)
    try:
        return fn(item), None
    except Exception as e:  # noqa: BLE001  raised in the process that asked
        return None, e
