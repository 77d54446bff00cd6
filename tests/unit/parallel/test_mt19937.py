"""Skipping a generator leaves it where drawing would."""

import pytest
import torch

from proctor.oracle.parallel.streams.mt19937 import position, skip


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 1247, 1248, 5000])
@pytest.mark.parametrize("before", [0, 1, 7, 624])
def test_skip_is_as_drawing(draws, before):
    there, here = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (there, here):
        torch.rand(before, generator=generator)
    torch.rand(draws, generator=there)
    skip(here, draws)
    assert torch.equal(torch.rand(700, generator=there), torch.rand(700, generator=here))
    assert torch.equal(there.get_state(), here.get_state())


def test_skip_keeps_the_spare_value_of_normal():
    there, here = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (there, here):
        torch.randn(3, generator=generator)
    torch.rand(40, generator=there)
    skip(here, 40)
    assert torch.equal(torch.randn(3, generator=there), torch.randn(3, generator=here))


def test_position_counts_draws():
    generator = torch.Generator().manual_seed(0)
    assert position(generator) == 0
    torch.rand(17, generator=generator)
    assert position(generator) == 17
