"""Items that are changed by chance: the same for the same number, whoever reads them."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch.utils.data import DataLoader, Dataset, Subset  # noqa: E402
from torch.utils.data._utils import fetch  # noqa: E402

from proctor.oracle.selfcheck import Unknown, registry  # noqa: E402
from proctor.oracle.selfcheck.watching.fork import random_states  # noqa: E402
from proctor.oracle.selfcheck.watching.items import read_by_number  # noqa: E402
from proctor.oracle.selfcheck.watching.step import Update  # noqa: E402


class Augmented(Dataset):
    def __init__(self, carries=False):
        self.carries, self.last = carries, torch.zeros(3)

    def __len__(self):
        return 40

    def __getitem__(self, i):
        before = self.last if self.carries else 0
        self.last = torch.full((3,), float(i)) + torch.rand(3) + random.random() + np.random.rand()
        return self.last + before


def batches(order, batch, workers=0, dataset=None):
    return [b for b in DataLoader(dataset or Augmented(), batch_sampler=[order[i : i + batch] for i in range(0, len(order), batch)], num_workers=workers)]


@pytest.mark.parametrize("dataset", [Augmented(), Subset(Augmented(), list(range(40)))])
def test_an_item_is_changed_alike_in_any_order_batch_and_worker(monkeypatch, dataset):
    monkeypatch.setattr(fetch._MapDatasetFetcher, "fetch", fetch._MapDatasetFetcher.fetch)  # what is put there is taken away again
    read_by_number()
    before = [str(x) for x in random_states()[1:]]
    whole = torch.cat(batches(list(range(12)), 4, dataset=dataset))
    assert [str(x) for x in random_states()[1:]] == before  # the program's generators are where they were
    assert len(whole.unique()) == 36
    other = torch.cat(batches(list(reversed(range(12))), 6, workers=2, dataset=dataset))
    assert torch.equal(whole, other.flip(0))


def judged(loader):
    return registry()["workers"].check(Update(None, "SGD", 2, [], [], [], {}, frozenset(), [], loaders=[loader]))


def test_workers_are_judged_where_items_are_changed_by_chance():
    assert judged(DataLoader(Augmented(), batch_size=4, shuffle=True)).verdict == "equivalent"
    assert judged(DataLoader(Augmented(carries=True), batch_size=4, shuffle=True)).verdict == "different"


def test_workers_are_not_judged_where_a_batch_is_changed_by_chance():
    with pytest.raises(Unknown, match="by chance"):
        judged(DataLoader(Augmented(), batch_size=4, collate_fn=lambda items: torch.stack(items) + torch.rand(3)))
