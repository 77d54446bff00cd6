"""In this process, one item after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from proctor.infer.executors import Item, Lost, Result


class SerialExecutor:
    workers = 1

    def map(self, fn: Callable[[Item], Result], items: Sequence[Item], keys: Sequence[str]) -> Iterator[tuple[int, Result | Lost]]:
        for i, item in enumerate(items):
            yield i, fn(item)

    def close(self) -> None:
        pass
