"""oracle/merging/locate.py: which part of a tensor a shard is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proctor.oracle.merging.locate import locate, take

RNG = np.random.default_rng(0)
FULL = RNG.standard_normal((12, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("local", "label"),
    [
        (FULL, ""),
        (FULL[6:], "0:1/2"),
        (FULL[:, 2:4], "1:1/4"),
        (FULL[4:8, 4:], "0:1/3 1:1/2"),
        (FULL.reshape(3, 2, 2, 8)[:, 1].reshape(6, 8), "0:1/2x3"),
        (np.concatenate([FULL[:3], FULL[9:]]), "0:0/2z"),
        (FULL[3:9], "0:1/2z"),
        (FULL[1::3], "0:1/3x4"),
        (FULL[:5], "0:0+5"),
        (FULL[7:], "0:7+5"),
    ],
)
def test_parts_are_found(local: Any, label: str) -> None:
    noisy = local * (1 + 1e-3 * RNG.standard_normal(local.shape)).astype(np.float32)
    found = locate(noisy, FULL)
    assert found is not None and found.sure
    assert found.part.label == label
    assert np.array_equal(take(FULL, found.part.places), local)


@pytest.mark.parametrize(
    ("local", "label", "kept"),
    [
        (np.concatenate([FULL[8:], FULL[:4]]), "0:8+4p", (4, 8)),
        (np.concatenate([FULL, FULL[:3]]), "0:0+12p", (12, 8)),
        (np.concatenate([FULL[5:10, 6:], np.ones((5, 3), np.float32)], 1), "", None),  # no block of five rows begins there
        (np.concatenate([FULL[10:], FULL[:3]])[:, :4], "", None),  # eight elements could be there by chance
    ],
)
def test_a_shard_with_padding_behind_the_whole(local: Any, label: str, kept: tuple[int, ...] | None) -> None:
    found = locate(local, FULL, padded=True)
    if kept is None:
        assert found is None or not found.sure
        return
    assert found is not None and found.sure and found.part.label == label and found.part.kept is not None
    assert tuple(map(len, found.part.kept)) == kept and np.array_equal(take(local, found.part.kept), take(FULL, found.part.places))
    plain = locate(local, FULL)
    assert plain is None or not plain.sure


def test_what_fits_nowhere_is_not_sure() -> None:
    found = locate(RNG.standard_normal((6, 8)).astype(np.float32), FULL)
    assert found is not None and not found.sure


def test_values_that_fit_in_several_places_are_not_sure() -> None:
    found = locate(np.zeros((6, 8), np.float32), np.zeros((12, 8), np.float32))
    assert found is not None and not found.sure


@pytest.mark.parametrize("shape", [(12,), (13, 8), (12, 8, 1)])
def test_a_shape_that_is_no_part_is_none(shape: tuple[int, ...]) -> None:
    assert locate(np.zeros(shape, np.float32), FULL) is None


def test_nan_fits_nowhere() -> None:
    found = locate(np.full((6, 8), np.nan, np.float32), FULL)
    assert found is not None and not found.sure and found.error == float("inf")


def test_scalars_and_empty_tensors() -> None:
    assert locate(np.array(1.0), np.array(1.0)) is not None
    found = locate(np.zeros((0, 8)), FULL)
    assert found is None or not found.sure


@pytest.mark.parametrize("dim", [0, 1])
def test_single_slices_in_any_order_are_found(dim: int) -> None:
    chosen = [0, 1, 5, 7, 11][: 5 if dim == 0 else 3]
    local = np.take(FULL, chosen, dim)
    found = locate(local, FULL, slices=True)
    assert found is not None and found.sure and found.part.places[dim].tolist() == chosen


def test_slices_that_are_there_twice_are_not_sure() -> None:
    twice = np.concatenate([FULL[:6], FULL[:6]])
    found = locate(twice[[0, 2, 5, 9, 10]], twice, slices=True)
    assert found is not None and not found.sure
