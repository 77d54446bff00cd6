"""Items of a data set that are changed by chance: the same change for the same item, whoever reads it, and in whatever order."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Final

from torch.utils.data import IterableDataset
from torch.utils.data._utils import (
    fetch,  # what loader and workers read with, and nothing else; torch has no public name for it
)

from proctor.oracle.selfcheck.watching.fork import random_states, set_random_states
from proctor.oracle.selfcheck.watching.step import seeded

SPREAD: Final = 1_000_003  # seeds of neighbours are far from each other, and none is a usual seed


class Items:
    """A data set whose item of a number draws from generators that are seeded by the number.

    Args:
        dataset: the program's, with items by number.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, number: Any) -> Any:
        if not isinstance(number, Integral):
            return self._dataset[number]
        before = random_states()
        try:
            seeded((int(number) + 1) * SPREAD % 2**31)
            return self._dataset[number]
        finally:
            set_random_states(before)

    def __len__(self) -> int:
        return len(self._dataset)


def by_number(dataset: Any) -> Any:
    """The data set as `Items`; a stream as it is."""
    return dataset if isinstance(dataset, IterableDataset | Items) else Items(dataset)


def read_by_number() -> None:
    """All loaders of this process, and their workers, read so from here on."""
    original = fetch._MapDatasetFetcher.fetch

    def items(self: Any, numbers: Any) -> Any:
        self.dataset = by_number(self.dataset)
        return original(self, numbers)

    fetch._MapDatasetFetcher.fetch = items
