"""On a `dask.distributed` cluster (extra `proctor[dask]`): `--executor dask --scheduler ADDRESS`.

Runs and relations must be readable on every worker: the same paths, and the same version of Proctor. Without an
address a cluster of processes is made on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from proctor.dask_client import connect, dask_library, workers_of
from proctor.infer.executors import Item, Lost, Result, one_line

_CONNECT_S = 20
_RETRIES = 0  # an item that kills a worker would kill the next one, too


class DaskExecutor:
    """A cluster's workers.

    Args:
        scheduler: its address, such as `tcp://10.0.0.1:8786`; "": a cluster on this machine.
        workers: processes of a cluster on this machine.

    Raises:
        UsageError: dask is not installed, or there is no scheduler at the address.
    """

    def __init__(self, scheduler: str = "", workers: int = 2) -> None:
        dask = dask_library()
        self._cluster: Any = None
        self._client: Any = None
        if not scheduler:
            self._cluster = dask.LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
        try:
            self._client = connect(self._cluster or scheduler, _CONNECT_S, "--scheduler")
        except BaseException:
            self.close()
            raise
        self._home: dict[str, str] = {}  # worker that had a key last

    @property
    def workers(self) -> int:
        return max(1, len(workers_of(self._client)))

    def map(self, fn: Callable[[Item], Result], items: Sequence[Item], keys: Sequence[str]) -> Iterator[tuple[int, Result | Lost]]:
        finished = dask_library().as_completed
        known = set(workers_of(self._client))
        futures: dict[Any, int] = {}
        for i, (item, key) in enumerate(zip(items, keys, strict=True)):
            home = self._home.get(key)
            prefer = {"workers": [home], "allow_other_workers": True} if home in known else {}
            try:
                futures[self._client.submit(_run, fn, item, pure=False, retries=_RETRIES, **prefer)] = i
            except Exception as e:  # noqa: BLE001  whatever dask raises of items that it cannot send
                yield i, Lost(one_line(e))
        try:
            for future in finished(list(futures), loop=self._client.loop):
                i = futures.pop(future)
                error = future.exception()
                if error is not None:
                    yield i, Lost(one_line(error), died=type(error).__name__ == "KilledWorker")
                    continue
                result, raised, worker = future.result()
                if raised is not None:
                    raise raised
                self._home[keys[i]] = worker
                future.release()
                yield i, result
        finally:
            self._client.cancel(list(futures))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._cluster is not None:
            self._cluster.close()


def _run(fn: Callable[[Any], Any], item: Any) -> tuple[Any, BaseException | None, str]:
    from dask.distributed import get_worker

    address = str(get_worker().address)
    try:
        return fn(item), None, address
    except Exception as e:  # noqa: BLE001  raised in the process that asked
        return None, e, address
