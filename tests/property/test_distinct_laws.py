"""Where each value is seen first: the native function and its twin say what the definition says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.native.twins import distinct as twin

try:
    from proctor.native import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

SIDES = [twin.first_seen, *([native.first_seen] if native is not None else [])]
VALUES = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))


@pytest.mark.parametrize("first_seen", SIDES)
@given(values=st.lists(VALUES, max_size=200))
def test_each_value_has_the_place_of_the_first_that_is_equal(first_seen: object, values: list[int]) -> None:
    found = np.frombuffer(first_seen(np.array(values, dtype=np.uint64)), dtype=np.uint32)  # type: ignore[operator]
    assert found.tolist() == [values.index(value) for value in values]


@pytest.mark.parametrize("first_seen", SIDES)
def test_many_values_and_values_that_differ_in_a_few_bits(first_seen: object) -> None:
    for values in (np.arange(1 << 14) % 5000, np.arange(5000) << 50, np.arange(5000) << 32):
        found = np.frombuffer(first_seen(values.astype(np.uint64)), dtype=np.uint32)  # type: ignore[operator]
        assert (found == np.arange(len(values)) % 5000).all()


@pytest.mark.parametrize("first_seen", SIDES)
@pytest.mark.parametrize("wrong", [np.zeros(4, dtype=np.int32), np.zeros((2, 2), dtype=np.uint64), np.zeros(8, dtype=np.uint64)[::2]])
def test_other_memory_is_refused(first_seen: object, wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="plain array"):
        first_seen(wrong)  # type: ignore[operator]
