"""native/compare.cpp and its numpy twin agree on every dtype, alignment and special value, and refuse what they cannot read."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import proctor.native
from proctor.native.twins import compare as twin

native = pytest.importorskip("proctor.native._native")
BACKENDS = native.fingerprint_backends()
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def close(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Counts are equal, sums agree to what fp32 lanes lose."""
    exact = (0, 1, 8, 9, 10)
    return all(a[i] == b[i] if i in exact else np.isclose(a[i], b[i], rtol=2e-6, atol=0, equal_nan=True) for i in range(11))


def test_which_implementation_is_active() -> None:
    assert proctor.native.compare_buffers is native.compare_buffers


@pytest.mark.parametrize("simd", BACKENDS)
@pytest.mark.parametrize("dtype", sorted(twin._STORED))
def test_native_equals_twin_on_any_bits(dtype: str, simd: str) -> None:
    rng = np.random.default_rng(1)
    width = np.dtype(twin._STORED[dtype]).itemsize
    for n in (0, 1, 3, 8, 31, 32, 33, 511, 512, 513, 1700):
        a, b = rng.integers(0, 256, (2, n * width), dtype=np.uint8)
        b[: b.size // 2] = a[: a.size // 2]
        assert close(native.compare_buffers(a, b, dtype, simd=simd), twin.compare_buffers(a, b, dtype)), n


@pytest.mark.parametrize("simd", BACKENDS)
def test_sums_of_known_vectors(simd: str) -> None:
    a, b = np.array([3.0, 4.0, 0.0], np.float32), np.array([0.0, 4.0, 5.0], np.float32)
    assert native.compare_buffers(a, b, "float32", simd=simd) == (3, 2, 34.0, 25.0, 41.0, 16.0, 5.0, 5.0, 0, 0, 0)


@pytest.mark.parametrize("simd", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("magnitude", [1e-36, 1e-22, 1e-10, 1e18, 1e30])
def test_squares_beyond_single_precision_are_not_lost(dtype: str, simd: str, magnitude: float) -> None:
    values = (np.random.default_rng(0).standard_normal(5000) * magnitude).astype(np.float32)
    a, b = values, values[::-1].copy()
    if dtype == "bfloat16":
        a, b = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    elif dtype == "float64":
        a, b = a.astype(np.float64), b.astype(np.float64)
    found = native.compare_buffers(a, b, dtype, simd=simd)
    assert close(found, twin.compare_buffers(a, b, dtype))
    assert found[2] > 0


@pytest.mark.parametrize("simd", BACKENDS)
def test_a_tiny_difference_of_large_values_is_exact(simd: str) -> None:
    b = np.full(100_000, 1.0, np.float32)
    a = b.copy()
    a[77_777] = np.nextafter(np.float32(1), np.float32(2))
    found = native.compare_buffers(a, b, "float32", simd=simd)
    assert found[1] == 1
    assert math.sqrt(found[2]) == pytest.approx(2.0**-23, rel=1e-6)
    assert found[6] == 2.0**-23


@pytest.mark.parametrize("simd", BACKENDS)
@pytest.mark.parametrize("at", [0, 511, 512, 1023, 1030])
def test_nonfinite_values_are_counted_and_left_out_of_the_sums(simd: str, at: int) -> None:
    b = np.ones(1031, np.float32)
    a = b.copy()
    a[at] = np.nan
    assert native.compare_buffers(a, b, "float32", simd=simd) == (1031, 1, 0.0, 1030.0, 1030.0, 1030.0, 0.0, 1.0, 1, 0, 1)
    b[at] = -np.inf
    assert native.compare_buffers(a, b, "float32", simd=simd)[8:] == (1, 1, 1)
    a[at] = -np.inf
    assert native.compare_buffers(a, b, "float32", simd=simd)[8:] == (1, 1, 0)
    b[at] = np.inf
    assert native.compare_buffers(a, b, "float32", simd=simd)[8:] == (1, 1, 1)
    a[at], b[at] = np.uint32(0x7FC00001).view(np.float32), np.nan
    assert native.compare_buffers(a, b, "float32", simd=simd)[8:] == (1, 1, 0)


@pytest.mark.parametrize("simd", BACKENDS)
def test_signed_zeros_differ_in_bits_alone(simd: str) -> None:
    found = native.compare_buffers(np.full(600, -0.0, np.float32), np.zeros(600, np.float32), "float32", simd=simd)
    assert found[:3] == (600, 600, 0.0)
    assert found[8:] == (0, 0, 0)


@pytest.mark.parametrize("simd", BACKENDS)
@pytest.mark.parametrize(("dtype", "stored"), [("float8_e4m3fn", np.uint8), ("float8_e5m2", np.uint8), ("float16", np.uint16), ("bfloat16", np.uint16)])
def test_every_short_float_is_read_as_torch_reads_it(dtype: str, stored: type, simd: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(np.iinfo(stored).max + 1).astype(stored)
    values = torch.from_numpy(bits.view(np.int8 if stored is np.uint8 else np.int16).copy()).view(getattr(torch, dtype)).double().numpy()
    for i in range(0, bits.size, 1 if stored is np.uint8 else 397):
        found = native.compare_buffers(np.full(33, bits[i]), np.zeros(33, stored), dtype, simd=simd)
        if math.isfinite(values[i]):
            assert found[3] == pytest.approx(33 * values[i] ** 2, rel=1e-6)
            assert found[6] == abs(values[i])
        else:
            assert found[8] == found[10] == 33


def test_integers_are_compared_exactly() -> None:
    a, b = np.array([2**62, -(2**63)], np.int64), np.array([2**62 + 1, 2**63 - 1], np.int64)
    found = native.compare_buffers(a, b, "int64")
    assert found[1] == 2
    assert found[6] == 2.0**64
    assert native.compare_buffers(np.array([True, False]), np.array([True, True]), "bool")[:3] == (2, 1, 1.0)


def test_any_alignment() -> None:
    room = np.zeros(4 * 3000 + 64, np.uint8)
    values = np.random.default_rng(3).standard_normal(3000).astype(np.float32)
    other = values * np.float32(1.25)
    wanted = native.compare_buffers(values, other, "float32")
    for shift in range(1, 64, 7):
        room[shift : shift + 12000] = values.view(np.uint8)
        assert native.compare_buffers(memoryview(room)[shift : shift + 12000], other, "float32") == wanted


@pytest.mark.parametrize("call", [native.compare_buffers, twin.compare_buffers])
def test_bad_buffers_are_refused(call: Any) -> None:
    a = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="cannot be compared"):
        call(a, a[:3], "float32")
    with pytest.raises(ValueError, match="not one of those"):
        call(a, a, "float7")
    with pytest.raises(ValueError, match="no whole number"):
        call(b"abc", b"abd", "float32")
    with pytest.raises((ValueError, BufferError)):
        call(np.zeros((4, 4), np.float32).T[1:], np.zeros((4, 4), np.float32).T[1:], "float32")
    with pytest.raises(TypeError):
        call(3, a, "float32")


def test_other_threads_run_meanwhile() -> None:
    a = np.zeros(32 << 20, np.uint8)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        start = time.perf_counter()
        native.compare_buffers(a, a, "float16", simd="scalar")
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert sum(start + 0.1 * (end - start) < t < end - 0.1 * (end - start) for t in ticks) >= 3
