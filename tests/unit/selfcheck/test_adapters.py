"""Adapters: half the batch and twice the accumulation, of the same samples in the same order; what cannot be halved is left alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

from proctor.oracle.selfcheck.adapters import halved
from proctor.oracle.selfcheck.adapters.transformers import _halve


def test_a_loader_of_half_the_batch_gives_the_same_samples_in_the_same_order() -> None:
    def batches(half: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, shuffle=True, generator=generator)
        return [x for (x,) in (halved(loader) if half else loader)]

    whole, halves = batches(False), batches(True)
    assert [len(x) for x in halves] == [2] * 5
    assert torch.equal(torch.cat(whole), torch.cat(halves))
    odd = DataLoader(TensorDataset(torch.arange(9)), batch_size=3)
    assert halved(odd) is odd


def test_training_arguments_keep_the_rows_of_an_update() -> None:
    arguments = SimpleNamespace(per_device_train_batch_size=8, gradient_accumulation_steps=3, auto_find_batch_size=False)
    _halve(arguments)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 6)
    for batch, found in ((5, False), (8, True)):
        left = SimpleNamespace(per_device_train_batch_size=batch, gradient_accumulation_steps=1, auto_find_batch_size=found)
        _halve(left)
        assert (left.per_device_train_batch_size, left.gradient_accumulation_steps) == (batch, 1)
