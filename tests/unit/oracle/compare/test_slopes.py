"""oracle/numbers/slopes.py finds a factor on one part where the norm sees nothing, and is quiet about noise."""

from __future__ import annotations

import numpy as np

from proctor.oracle.judging.verdicts import TensorVerdict, with_slopes
from proctor.oracle.numbers.slopes import cuts, flags, slopes

U = 2.0**-8
HEADS = 8


def noisy(r: np.ndarray, seed: int, size: float = 4 * U) -> np.ndarray:
    return (r * (1 + size * np.random.default_rng(seed).standard_normal(r.shape))).astype(np.float32)


def pooled(r: np.ndarray, dim: int) -> list[float]:
    rows = [slopes(noisy(r, s), r, "float32", dim, HEADS).alphas for s in range(4)]
    return np.square(rows).mean(axis=0).tolist()


def test_one_percent_in_one_head_is_found_below_the_noise_of_the_norm() -> None:
    r = np.random.default_rng(0).standard_normal((64, HEADS * 16)).astype(np.float32)
    c = noisy(r, 99)
    c[:, 3 * 16 : 4 * 16] *= 1.01
    assert np.linalg.norm(c - r) < 3 * np.linalg.norm(noisy(r, 1) - r)
    found = flags(slopes(c, r, "float32", 1, HEADS), pooled(r, 1), 4, U, alone=True)
    assert [f.part for f in found] == [3]
    assert abs(found[0].alpha - 0.01) < 5e-3


def test_correct_runs_are_not_flagged() -> None:
    for seed in range(200):
        r = np.random.default_rng(seed).standard_normal((16, HEADS * 4)).astype(np.float32)
        assert not flags(slopes(noisy(r, seed + 1000), r, "float32", 1, HEADS), pooled(r, 1), 4, U, alone=True)


def test_empty_parts_have_no_slope() -> None:
    r = np.random.default_rng(0).standard_normal((HEADS, 10)).astype(np.float32)
    r[0] = 0
    c = r.copy()
    c[0] = 1
    seen = slopes(c, r, "float32", 0, HEADS)
    assert seen.solid == (False, *[True] * (HEADS - 1))
    assert not flags(seen, [0.0] * HEADS, 4, U)


def test_parts_need_not_divide_the_dimension() -> None:
    r = np.ones((10, 3), np.float32)
    assert slopes(r * np.float32(1.5), r, "float32", 0, 4).alphas == (0.5, 0.5, 0.5, 0.5)
    assert slopes(r[:2], r[:2], "float32", 0, 4).solid == (True, True, False, False)


def test_cuts_are_equal_parts_of_some_size() -> None:
    assert cuts((64, 12)) == [(0, 8), (1, 6)]
    assert cuts((4, 8)) == []
    assert cuts(()) == [] and cuts((7,)) == []
    assert cuts((17, 100)) == [(1, 5)]


def test_a_slope_is_proof_in_a_module_alone_and_a_remark_end_to_end() -> None:
    r = np.random.default_rng(0).standard_normal((64, HEADS * 16)).astype(np.float32)
    c = noisy(r, 99)
    c[:, :16] *= 1.02
    seen = slopes(c, r, "float32", 1, HEADS)
    fine = TensorVerdict(name="attn", ratio=0.3)
    alone = with_slopes(fine, flags(seen, pooled(r, 1), 4, U, alone=True), 1, HEADS, alone=True)
    assert (alone.verdict, alone.ratio > 1) == ("bad", True)
    assert alone.note.startswith("part 0 of 8 along dim 1 scaled by 1.02")
    assert with_slopes(fine, flags(seen, pooled(r, 1), 4, U), 1, HEADS).verdict in ("ok", "warn")
    assert with_slopes(fine, [], 1, HEADS) is fine
