"""A moment's difference is its gradient's where it follows from it, and its own where it does not."""

from __future__ import annotations

import numpy as np

from proctor.oracle.numbers.moments import owed

RNG = np.random.default_rng(0)
GRADIENT = RNG.standard_normal(64).astype(np.float32)
OWN = (GRADIENT + 0.01 * RNG.standard_normal(64)).astype(np.float32)
ROUNDING = 2.0**-24


def test_what_another_gradient_makes_of_first_and_second_moments() -> None:
    for factor, power in ((0.1, 1), (1.0, 1), (1e-3, 2)):
        state = np.float32(factor) * GRADIENT**power
        part = owed(state, GRADIENT, OWN, ROUNDING)
        assert part is not None
        np.testing.assert_allclose(state + part, factor * OWN.astype(np.float64) ** power, rtol=1e-5, atol=1e-9)


def test_states_that_do_not_follow_from_the_gradient() -> None:
    assert owed(0.1 * GRADIENT + 0.9 * np.roll(GRADIENT, 1), GRADIENT, OWN, ROUNDING) is None  # it has a history
    assert owed(np.abs(GRADIENT), GRADIENT, OWN, ROUNDING) is None
    assert owed(np.zeros(64, np.float32), GRADIENT, OWN, ROUNDING) is None
    assert owed(1e-3 * GRADIENT**2, np.zeros(64, np.float32), OWN, ROUNDING) is None
    assert owed(GRADIENT[:32], GRADIENT, OWN, ROUNDING) is None
    assert owed(GRADIENT, GRADIENT, np.full(64, np.nan, np.float32), ROUNDING) is None


def test_a_wrong_factor_is_not_explained() -> None:
    part = owed(1e-3 * GRADIENT**2, GRADIENT, OWN, ROUNDING)
    assert part is not None
    wrong = 2e-3 * OWN.astype(np.float64) ** 2  # another beta
    left = np.linalg.norm(wrong - part - 1e-3 * GRADIENT**2) / np.linalg.norm(1e-3 * GRADIENT**2)
    assert left > 0.9
