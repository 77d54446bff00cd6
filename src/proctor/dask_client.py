"""A connection to a dask cluster (extra `proctor[dask]`): called by inference, proofs and campaigns that are spread over one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from proctor.errors import UsageError


def dask_library() -> Any:
    """`dask.distributed`, whose functions are not typed.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import dask.distributed
    except ImportError:
        raise UsageError("dask.distributed is not installed", hint="pip install 'proctor[dask]'") from None
    return dask.distributed


def connect(to: Any, timeout_s: float, option: str) -> Any:
    """A client of a scheduler, which who asks closes.

    Args:
        to: the scheduler's address, or a cluster of this process.
        timeout_s: for it to answer.
        option: of the command line, that named it.

    Raises:
        UsageError: dask is not installed, or there is no scheduler.
    """
    try:
        return dask_library().Client(to, timeout=timeout_s, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as e:
        raise UsageError(f"{option} {to}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no scheduler'}", hint="dask scheduler") from None


@contextmanager
def connected(address: str, timeout_s: float) -> Iterator[Any]:
    """The same for a while, of an address that `--dask` named."""
    client = connect(address, timeout_s, "--dask")
    try:
        yield client
    finally:
        with suppress(Exception):  # a scheduler that is gone
            client.close(timeout=5)


def workers_of(client: Any) -> list[str]:
    """Addresses of a cluster's workers, asked of the scheduler.

    `scheduler_info` is what the client was told last: it is written over by the client's own look now and then, and is empty for that moment.
    """
    return list(client.nthreads())
