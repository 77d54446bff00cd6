"""Where the shards of an inference are worked on: here, in a pool of processes, or on a cluster.

An executor maps a function over items and gives results as they finish, in no particular order. It knows nothing of
traces; functions and items are picklable, since they may travel to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lost:
    """Instead of a result: the worker died, or the item could not travel to it or back."""

    why: str
    died: bool = False  # the process is gone, often for lack of memory


class Executor(Protocol):
    """Runs a function on many items."""

    @property
    def workers(self) -> int:
        """Items that are worked on at a time."""

    def map(self, fn: Callable[[Item], Result], items: Sequence[Item], keys: Sequence[str]) -> Iterator[tuple[int, Result | Lost]]:
        """Index and result of each item, as they finish.

        Args:
            fn: importable by name; what it raises is raised here.
            items: one a call of `fn`.
            keys: what each item is about. Items with a key that a worker had before go to that worker again if it is
                free, because it may still hold what it read.
        """

    def close(self) -> None:
        """Let the workers go; also when not all is done."""


def one_line(error: BaseException) -> str:
    """An error as a sentence: its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
