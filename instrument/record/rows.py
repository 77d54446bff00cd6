"""Handing rows from the training thread to the writer's thread without a lock and without losing one."""

from __future__ import annotations

from typing import Any


def take(rows: list[Any]) -> list[Any]:
    """Remove and return what a list holds, while another thread may append to it.

    The list stays the same object. To replace it by an empty one would lose what a thread appends that has read the
    attribute just before: two operations, with a switch of threads between them. Each operation here is one under the GIL.
    """
    taken = rows[:]
    del rows[: len(taken)]
    return taken
