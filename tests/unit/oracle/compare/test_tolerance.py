"""oracle/numbers/tolerance.py: the formula, its floors, and what a file of it may hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proctor.errors import OracleError
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.tolerance import Estimate, TensorKey, tolerance, unit_roundoff

KEY = TensorKey(0, 0, "output", "layers.0.mlp")


def test_noise_decides_where_it_is_larger_than_rounding() -> None:
    t = tolerance(1e-3, 1.0, "float32", "output", n=100)
    assert (t.absolute, t.binding) == (3e-3, "noise")
    assert t.relative == 3e-3
    assert not t.powerless


def test_rounding_is_the_floor() -> None:
    t = tolerance(0.0, 2.0, "bfloat16", "output", n=100)
    assert (t.absolute, t.binding) == (3 * 2.0**-8 * 2, "rounding")
    assert tolerance(0.0, 2.0, "bfloat16", "param", n=100, copied=True).absolute == t.absolute / 4


def test_smallest_numbers_are_the_floor_of_zero_tensors() -> None:
    t = tolerance(0.0, 0.0, "float32", "main_grad", n=16)
    assert t.absolute == 3 * 4 * 2.0**-126
    assert t.relative == math.inf


def test_scalars_have_four_ulp() -> None:
    t = tolerance(0.0, 1.5, "float32", "scalar", n=1)
    assert t.absolute == 3 * 4 * 2.0**-23
    assert tolerance(0.0, 0.0, "float32", "scalar").absolute > 0


def test_zero_mean_gradient_needs_no_special_case() -> None:
    # The bias of a key projection: reference 3.5e-7, noise 9.2e-7, a correct candidate is off by 7.7e-7.
    t = tolerance(9.2e-7, 3.5e-7, "float32", "main_grad", n=64)
    assert t.absolute > 7.7e-7
    assert t.powerless


def test_paper_mode_takes_a_greater_multiple() -> None:
    assert tolerance(1.0, 100.0, "float32", "output", n=90, mode="paper").absolute == 5.0
    assert tolerance(1.0, 100.0, "bfloat16", "output", n=90, mode="paper", fp8="float8_e4m3fn").absolute == 13.0


def test_few_samples_are_trusted_less() -> None:
    widths = [tolerance(1.0, 100.0, "float32", n=90, samples=k).absolute for k in (1, 2, 3, 4, 8)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1.5 * widths[3]


def test_fp8_modules_have_a_quarter_of_its_roundoff() -> None:
    assert unit_roundoff("bfloat16", "float8_e4m3fn") == 2.0**-6
    assert unit_roundoff("bfloat16", "float8_e5m2") == 2.0**-5
    assert unit_roundoff("bfloat16") == 2.0**-8
    assert unit_roundoff("int64", "float8_e5m2") == 0.0


def test_few_numbers_need_a_greater_multiple() -> None:
    widths = [tolerance(1.0, 1e6, "float64", "scalar", n=n).absolute for n in (1, 2, 4, 8, 9, 1000)]
    assert widths == [15.54, 6.0, 3.48, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_false_alarms_of_small_tensors_are_rare(n: int) -> None:
    rng = np.random.default_rng(n)
    noise = np.sqrt(np.square(rng.standard_normal((20_000, 4, n))).sum(-1).mean(-1))
    candidate = np.sqrt(np.square(rng.standard_normal((20_000, n))).sum(-1))
    ratios = [c / tolerance(e, 1e9, "float64", n=n).absolute for c, e in zip(candidate[:2000], noise[:2000])]
    assert max(ratios) < 1.2
    multiple = tolerance(1.0, 1.0, "float64", n=n).absolute
    assert np.mean(candidate > multiple * noise) < 1e-3


def test_power_is_measured_in_the_signal() -> None:
    assert not tolerance(1e-5, 1.0, "float32", "param_after", n=90).powerless
    assert tolerance(1e-5, 1.0, "float32", "param_after", n=90, signal=1e-5).powerless


def samples_of(r: np.ndarray, k: int = 4) -> Estimate:
    made = Estimate()
    for s in range(k):
        noise = np.random.default_rng(s).uniform(-1, 1, r.shape)
        made.add(KEY, s, compare((r * (1 + 2.0**-24 * math.sqrt(3) * noise)).astype(np.float32), r, "float32"), "float32")
    return made


def test_estimate_is_the_root_mean_square_over_samples() -> None:
    r = np.random.default_rng(9).standard_normal(10_000).astype(np.float32)
    noise = samples_of(r).get(KEY)
    assert noise is not None
    assert noise.error == pytest.approx(2.0**-24 * float(np.linalg.norm(r)), rel=0.3)


def test_unknown_tensor_has_no_tolerance() -> None:
    r = np.ones(4, np.float32)
    assert samples_of(r).tolerance(TensorKey(0, 0, "output", "other"), compare(r, r, "float32"), "float32") is None


def test_flipped_decisions_are_counted() -> None:
    r = np.arange(1000)
    p = r.copy()
    p[:10] += 1
    made = Estimate()
    for s in range(4):
        made.add(KEY, s, compare(p, r, "int64"), "int64")
    t = made.tolerance(KEY, compare(p, r, "int64"), "int64")
    assert t is not None
    assert t.absolute == 30.0
    none = Estimate()
    none.add(KEY, 0, compare(r, r, "int64"), "int64")
    t = none.tolerance(KEY, compare(p, r, "int64"), "int64")
    assert t is not None and t.absolute == 0.0


def test_a_sample_that_overflows_leaves_no_power() -> None:
    r = np.ones(4, np.float32)
    p = r.copy()
    p[0] = np.inf
    made = samples_of(r)
    made.add(KEY, 4, compare(p, r, "float32"), "float32")
    t = made.tolerance(KEY, compare(r * 2, r, "float32"), "float32")
    assert t is not None and t.binding == "unstable"


def test_file_round_trip_and_damage() -> None:
    made = samples_of(np.ones(50, np.float32))
    made.add_slopes(KEY, "0:2", [1e-3, 2e-3], "float32")
    made.add_slopes(KEY, "0:2", [3e-3, 0.0], "float32")
    noise = made.get(KEY)
    assert noise is not None
    assert noise.slopes["0:2"] == pytest.approx([5e-6, 2e-6])
    data = made.to_json()
    assert Estimate.from_json(data).get(KEY) == noise
    for bad in (b"", b"[]", b'{"schema":9,"mode":"all","tensors":[]}', b'{"schema":1,"mode":"most","tensors":[]}', data[:-4], data.replace(b'"0":', b'"0":-', 1)):
        with pytest.raises(OracleError):
            Estimate.from_json(bad, "cache.json")


def layers(x: np.ndarray, weights: list[np.ndarray], split: int = 1, noise: np.random.Generator | None = None, wrong: int = -1) -> list[np.ndarray]:
    """Outputs of a residual network in float32; `split` sums partial products as tensor parallelism does."""
    outputs = []
    for i, w in enumerate(weights):
        parts = [p @ q for p, q in zip(np.split(x, split, axis=1), np.split(w, split, axis=0))]
        kept = parts[1:] if i == wrong else parts
        x = (x + np.tanh(sum(kept, np.zeros_like(parts[0])))).astype(np.float32)
        if noise is not None:
            x = (x * (1 + 2.0**-24 * math.sqrt(3) * noise.uniform(-1, 1, x.shape))).astype(np.float32)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("seed", range(5))
def test_rounding_of_split_products_is_inside_and_a_missing_part_outside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((32, 64)).astype(np.float32)
    weights = [(rng.standard_normal((64, 64)) / 8).astype(np.float32) for _ in range(12)]
    reference = layers(x, weights)
    estimate = Estimate()
    for s in range(4):
        for i, p in enumerate(layers(x, weights, noise=np.random.default_rng(100 + s))):
            estimate.add(TensorKey(0, 0, "output", str(i)), s, compare(p, reference[i], "float32"), "float32")

    def ratios(candidate: list[np.ndarray]) -> list[float]:
        found = []
        for i, c in enumerate(candidate):
            d = compare(c, reference[i], "float32")
            t = estimate.tolerance(TensorKey(0, 0, "output", str(i)), d, "float32")
            assert t is not None and not t.powerless
            found.append(d.error / t.absolute)
        return found

    for split in (2, 4, 8):
        assert max(ratios(layers(x, weights, split))) < 1
    wrong = ratios(layers(x, weights, 4, wrong=5))
    assert max(wrong[:5]) < 1 and min(wrong[5:]) > 1e3
