"""Philox: native against numpy bit for bit, both against Python's whole numbers and the published test vectors; normal numbers are normal."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.native import ACTIVE
from proctor.native.twins import philox as _philox_py
from proctor.oracle.parallel.streams import philox

STRETCHES = st.tuples(st.lists(st.integers(0, 2**60), max_size=5), st.integers(0, 300))


def by_whole_numbers(key, counter, domain=0):
    c = [counter & 0xFFFFFFFF, counter >> 32, domain, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.fixture(params=["python", "native"])
def kernels(request):
    if request.param == "python":
        return _philox_py
    if ACTIVE != "native":
        pytest.skip("the extension is not built")
    from proctor.native import _native

    return _native


def test_the_published_vectors(kernels):
    # Random123, kat_vectors: philox4x32 10, counter and key of zeros.
    out = np.empty(4, np.uint32)
    kernels.philox_words(0, np.zeros(1, np.int64), 4, 1, 0, out)
    assert out.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**60), min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_words_are_those_of_whole_numbers_wherever_a_stretch_begins(key, starts, length, each, domain):
    found = philox.words(key, np.array(starts), length, each, domain)
    for row, start in zip(found, starts):
        for at, got in enumerate(row):
            first = (start + at) * each
            assert got.tolist() == [by_whole_numbers(key, (first + w) // 4, domain)[(first + w) % 4] for w in range(each)]


@pytest.mark.skipif(ACTIVE != "native", reason="the extension is not built")
@given(st.integers(0, 2**64 - 1), STRETCHES)
def test_the_native_kernels_have_the_bits_of_numpy(key, stretches):
    from proctor.native import _native

    starts, length = np.array(stretches[0], np.int64), stretches[1]
    for kind in ("philox_unit", "philox_normal"):
        ours, twin = (np.empty((len(starts), length), np.float32) for _ in range(2))
        getattr(_native, kind)(key, starts, length, ours)
        getattr(_philox_py, kind)(key, starts, length, twin)
        assert ours.tobytes() == twin.tobytes(), kind


def test_normal_numbers_are_near_to_what_double_precision_makes_of_the_same_words():
    words = philox.words(3, np.zeros(1, np.int64), 1 << 16, domain=2).reshape(-1, 2)
    u1, u2 = ((words[:, 0] >> 8).astype(np.float64) + 1) / 2**24, (words[:, 1] >> 8).astype(np.float64) / 2**24
    radius, turn = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    expected = np.stack([radius * np.cos(turn), radius * np.sin(turn)], 1).reshape(-1)
    assert np.abs(philox.normal(3, np.zeros(1, np.int64), 1 << 16)[0] - expected).max() < 1e-6


def test_normal_numbers_are_normal():
    count = 1 << 18
    z = np.sort(philox.normal(1, np.zeros(1, np.int64), count)[0].astype(np.float64))
    at = np.arange(0, count, 64)
    theory = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z[at]])
    assert np.abs(theory - (at + 0.5) / count).max() < 1.95 / math.sqrt(count)  # Kolmogorov, one run in a thousand, and the seed is fixed
    assert abs(np.corrcoef(philox.normal(1, np.zeros(1, np.int64), count)[0].reshape(-1, 2).T)[0, 1]) < 4 / math.sqrt(count / 2)


@pytest.mark.parametrize(
    ("starts", "each", "out", "message"),
    [
        (np.zeros(2, np.int32), 1, np.empty(8, np.uint32), "starts: a plain array of int64"),
        (np.zeros(2, np.int64), 3, np.empty(24, np.uint32), "each: 1, 2 or 4"),
        (np.zeros(2, np.int64), 1, np.empty(7, np.uint32), "out: a contiguous array"),
        (np.zeros(2, np.int64), 1, np.empty(16, np.uint32)[::2], "out: a contiguous array"),
        (np.zeros(2, np.int64), 1, np.empty(8, np.uint64), "out: a contiguous array"),
    ],
)
def test_other_arrays_are_refused(kernels, starts, each, out, message):
    with pytest.raises(ValueError, match=message):
        kernels.philox_words(1, starts, 4, each, 0, out)
