"""A connection to a dask cluster (extra `proctor[dask]`): called by proofs that are spread over one, and by campaigns on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from proctor.errors import UsageError


@contextmanager
def connected(address: str, timeout_s: float) -> Iterator[Any]:
    """A client of the scheduler at an address; its functions are not typed.

    Args:
        address: of the scheduler.
        timeout_s: for it to answer.

    Raises:
        UsageError: dask is not installed, or there is no scheduler.
    """
    try:
        import dask.distributed as dask
    except ImportError:
        raise UsageError("dask.distributed is not installed", hint="pip install 'proctor[dask]'") from None
    cluster: Any = dask
    try:
        client = cluster.Client(address, timeout=timeout_s, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as e:
        raise UsageError(f"--dask {address}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no scheduler'}", hint="dask scheduler") from None
    try:
        yield client
    finally:
        with suppress(Exception):  # a scheduler that is gone
            client.close(timeout=5)
