"""oracle/merging/reference.py, and what of an update its gradients speak for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from proctor.oracle.judging.tensor_judge import TensorJudge
from proctor.oracle.merging.reference import telling
from proctor.oracle.numbers.difference import compare


@pytest.mark.parametrize(
    ("values", "count"),
    [([1.0] * 7, 7), ([1e6, 1.0, 1.0, 1.0], 1), ([3.0, -3.0, 0.0, 0.0], 2), ([0.0] * 5, 5), ([float("nan"), 1.0], 2), ([], 0)],
)
def test_elements_that_a_norm_is_made_of(values: list[float], count: int) -> None:
    assert telling(np.array(values, np.float32)) == count


def update(grad: list[float], tolerance: float = 0.0) -> Any:
    """The squared error of an update whose first element went the other way, and that of the elements that count."""
    key = (0, 0, "main_grad", "w", "")
    entry = SimpleNamespace(shape=(len(grad),), dtype="float32")
    reference = SimpleNamespace(
        entries={key: entry, (0, 0, "param_after", "w", ""): entry},
        array=lambda _: np.array(grad, np.float32),
        tolerance=lambda *_: SimpleNamespace(absolute=tolerance),
    )
    theirs = np.ones(len(grad), np.float32)
    mine = theirs.copy()
    mine[0] = -1.0
    asked = SimpleNamespace(reference=reference, mode="all")
    whole = compare(mine, theirs, "float32")
    return whole.error, TensorJudge._where_gradients_tell(asked, (0, 0, "param_after", "w", ""), mine, theirs, whole).error  # type: ignore[arg-type]


def test_an_update_is_judged_where_its_gradient_is_no_noise() -> None:
    assert update([1e-9, 1.0, -1.0, 2.0], tolerance=1e-6) == (2.0, 0.0)  # the sign of noise
    assert update([1.0, 1.0, -1.0, 2.0], tolerance=1e-6) == (2.0, 2.0)  # the sign of a gradient
    assert update([1e-9, 1e-9, 1e-9, 2.0], tolerance=1e-6) == (2.0, 2.0)  # most of it would be left out
    assert update([1e-9, 3e-6, -3e-6, 2e-6], tolerance=4e-7) == (2.0, 0.0)  # above 10 times the noise, not above 100
