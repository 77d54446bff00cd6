"""What is known of the program's objects without a line of it being run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from proctor.instrument.observe.plainly import inside, is_tensor, lazy, own, placed
from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes.source.lengths import counted


class Items(Dataset[int]):
    def __init__(self) -> None:
        self.items, self.table, self.count, self.parts = list(range(10)), torch.zeros(7, 2), 20, {"train": [1, 2, 3]}

    def __getitem__(self, i: int) -> int:
        return self.items[i]


class OfItems(Items):
    def __len__(self) -> int:
        return len(self.items)


class OfTable(Items):
    def __len__(self) -> int:
        return self.table.shape[0]


class Divided(Items):
    def __len__(self) -> int:
        return self.count // 3 - 1


class OfPart(Items):
    def __len__(self) -> int:
        return len(self.parts["train"])


class OfAnother(Items):
    def __init__(self) -> None:
        self.inner = OfItems()

    def __len__(self) -> int:
        return len(self.inner)


class Asked(Items):
    asked = 0

    def __len__(self) -> int:
        Asked.asked += 1
        return 5


class Computed(Items):
    @property
    def many(self) -> int:
        Asked.asked += 1
        return 5

    def __len__(self) -> int:
        return self.many


@pytest.mark.parametrize(("kind", "length"), [(OfItems, 10), (OfTable, 7), (Divided, 5), (OfPart, 3), (OfAnother, 10)])
def test_a_length_is_worked_out(kind: type[Any], length: int) -> None:
    data = kind()
    assert counted(data) == length == len(data)
    assert counted(DataLoader(data, batch_size=2)) == -(-length // 2)
    assert counted(DataLoader(data, batch_size=2, shuffle=True)) == -(-length // 2)


@pytest.mark.parametrize("kind", [Asked, Computed])
def test_a_length_that_only_the_program_knows_is_unknown(kind: type[Any]) -> None:
    loader = DataLoader(kind(), batch_size=2)
    before = Asked.asked
    assert counted(kind()) is counted(loader) is counted(BatchSampler(loader.sampler, 2, False)) is None
    assert Asked.asked == before


def test_lengths_of_what_torch_ships() -> None:
    table = TensorDataset(torch.zeros(6, 2))
    assert [counted(one) for one in (table, Subset(table, [0, 1]), ConcatDataset([table, table]), RandomSampler(table), DataLoader(table, batch_size=4))] == [6, 2, 12, 6, 2]


def test_a_stream_has_no_length() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

        def __len__(self) -> int:
            raise AssertionError("asked")

    assert counted(Stream()) is None


def test_attributes_that_are_data() -> None:
    class Thing:
        plain, computed = 3, property(lambda self: 1 / 0)

        def __init__(self) -> None:
            self.mine = 4

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert [own(Thing(), name, "none") for name in ("mine", "plain", "computed", "absent", "__init__")] == [4, 3, "none", "none", "none"]


def test_what_containers_hold() -> None:
    class Odd(dict[str, int]):
        def values(self) -> Any:
            raise AssertionError("asked")

    assert [inside(one) for one in (Odd(a=1), [1, 2], (3,), "text")] == [[1], [1, 2], [3], None]


def test_tensors_that_lie_in_memory() -> None:
    uninitialized = nn.LazyLinear(3).weight
    assert [is_tensor(one) for one in (torch.ones(1), uninitialized, [1.0])] == [True, True, False]
    assert lazy(uninitialized)
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    assert [placed(one) for one in (torch.ones(1), uninitialized, torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), ragged)] == [True, False, False, False, False]


def test_packages_that_an_installer_put_elsewhere_are_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bundle", "project"):
        (tmp_path / name).mkdir()
    (tmp_path / "bundle" / "something-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "bundle"), str(tmp_path / "project")])
    found = library_prefixes()
    assert f"{tmp_path}/bundle/" in found
    assert f"{tmp_path}/project/" not in found
