"""Laws of the comparison: all implementations agree, pieces add up to the whole, the order of samples is irrelevant."""

from __future__ import annotations

import itertools
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.native.twins import compare as twin
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.dtypes import storage
from proctor.oracle.numbers.tolerance import Estimate, TensorKey

try:
    from proctor.native import _native as native
except ImportError:
    native = None

BACKENDS = native.fingerprint_backends() if native else []
KEY = TensorKey(0, 0, "output", "layers.0")
EXACT = (0, 1, 8, 9, 10)

dtypes = st.sampled_from(sorted(twin._STORED))
seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(st.integers(0, 70), st.integers(500, 530), st.integers(1000, 3000))
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1e-38, 3e38, -3e38, 6e-8, 65504.0, 448.0]


def content(dtype: str, n: int, seed: int, special: float) -> npt.NDArray[np.uint8]:
    """Two rows of bytes: alike numbers of one magnitude, some random bits, some special values, some equal."""
    rng = np.random.default_rng(seed)
    stored = np.dtype(twin._STORED[dtype])
    if dtype in ("float64", "float32", "float16", "complex64", "complex128"):
        with np.errstate(over="ignore"):
            values = (rng.standard_normal((2, n)) * 10.0 ** rng.integers(-30, 30)).astype(stored)
            values[1] = np.where(rng.random(n) < 0.7, values[0] * (1 + 1e-3 * rng.standard_normal(n)), values[1])
            odd = rng.random((2, n)) < special
            values[odd] = rng.choice(SPECIAL, int(odd.sum())).astype(stored)
        rows = values.view(np.uint8).reshape(2, n * stored.itemsize)
    else:
        rows = rng.integers(0, 256, (2, n * stored.itemsize), dtype=np.uint8)
        same = rng.random(n) < 0.5
        rows[1].reshape(n, stored.itemsize)[same] = rows[0].reshape(n, stored.itemsize)[same]
    return rows


@pytest.mark.skipif(not BACKENDS, reason="the native module is not built")
@settings(deadline=None, max_examples=300)
@given(dtype=dtypes, n=sizes, seed=seeds, special=st.sampled_from([0.0, 0.0, 0.01, 0.3]), shift=st.integers(0, 63))
def test_native_equals_twin(dtype: str, n: int, seed: int, special: float, shift: int) -> None:
    a, b = content(dtype, n, seed, special)
    room = np.zeros(a.size + shift, np.uint8)
    room[shift:] = a
    wanted = twin.compare_buffers(a, b, dtype)
    for simd in BACKENDS:
        found = native.compare_buffers(memoryview(room)[shift:], b, dtype, simd=simd)
        assert [found[i] for i in EXACT] == [wanted[i] for i in EXACT]
        # The product has no sign: it may cancel, and is then good to what its terms are.
        scale = float(np.sqrt(wanted[3]) * np.sqrt(wanted[4])) if np.isfinite(wanted[3] + wanted[4]) else 0.0
        for i in (2, 3, 4, 6, 7):
            assert np.isclose(found[i], wanted[i], rtol=3e-6, atol=1e-300, equal_nan=True), i
        assert np.isclose(found[5], wanted[5], rtol=3e-6, atol=3e-6 * scale + 1e-300, equal_nan=True)


@settings(deadline=None, max_examples=100)
@given(dtype=dtypes.filter(lambda d: not d.startswith("complex")), n=sizes, seed=seeds, data=st.data())
def test_differences_of_pieces_add_up(dtype: str, n: int, seed: int, data: st.DataObject) -> None:
    a, b = (row.view(storage(dtype)) for row in content(dtype, n, seed, 0.0))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    pieces = [compare(a[i:j], b[i:j], dtype) for i, j in itertools.pairwise([0, *cuts, n])]
    whole = compare(a, b, dtype)
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert (total.n, total.unequal, total.mismatch) == (whole.n, whole.unequal, whole.mismatch)
    # Blocks whose squares fp32 holds are subtracted in fp32, others in double, and what is a block depends on the cuts.
    assert np.isclose(total.max_diff, whole.max_diff, rtol=1e-6)
    assert np.isclose(total.diff_sq, whole.diff_sq, rtol=1e-5, equal_nan=True)
    assert np.isclose(total.reference_sq, whole.reference_sq, rtol=1e-5, equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), seed=seeds, samples=st.integers(1, 6), data=st.data())
def test_estimate_does_not_depend_on_pieces_or_order(n: int, seed: int, samples: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal(n).astype(np.float32)
    runs = [reference + rng.standard_normal(n).astype(np.float32) * np.float32(1e-6) for _ in range(samples)]
    whole, pieces = Estimate(), Estimate()
    adding: list[tuple[int, Difference]] = []
    for s, run in enumerate(runs):
        whole.add(KEY, s, compare(run, reference, "float32"), "float32")
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
        adding += [(s, compare(run[i:j], reference[i:j], "float32")) for i, j in itertools.pairwise([0, *cuts, n])]
    random.Random(seed).shuffle(adding)
    for s, difference in adding:
        pieces.add(KEY, s, difference, "float32")
    one, other = whole.get(KEY), pieces.get(KEY)
    assert one is not None and other is not None
    exact = np.sqrt(np.mean([np.sum((run.astype(np.float64) - reference) ** 2) for run in runs]))
    assert one.error == pytest.approx(exact, rel=1e-5)
    assert other.error == pytest.approx(one.error, rel=1e-6)
    back = Estimate.from_json(pieces.to_json())
    assert back.get(KEY) == other and back.mode == "all"
