"""oracle/numbers/difference.py: what two tensors differ by, whatever their types and layout."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proctor.errors import OracleError
from proctor.oracle.numbers.difference import compare, residual
from proctor.oracle.numbers.dtypes import from_float


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_norms_and_scale() -> None:
    r = normal(64, 32)
    d = compare(r * np.float32(2), r, "float32")
    assert d.error == pytest.approx(float(np.linalg.norm(r)), rel=1e-6)
    assert d.size == pytest.approx(float(np.linalg.norm(r)), rel=1e-6)
    assert d.scale == pytest.approx(2.0)
    assert d.relative == pytest.approx(1.0)
    assert not d.bit_equal


def test_layout_in_memory_does_not_matter() -> None:
    r = normal(48, 20)
    c = np.asfortranarray(r)
    assert compare(c, r, "float32").bit_equal
    assert compare(c[::2], r[::2], "float32").bit_equal


def test_integers_are_counted() -> None:
    a, b = np.arange(10), np.arange(10)
    b[3:5] += 100
    d = compare(a, b, "int64")
    assert (d.error, d.size, d.rounded) == (2.0, 10.0, False)


def test_other_dtypes_are_compared_as_values() -> None:
    r = normal(100)
    low = from_float(r, "bfloat16")
    d = compare(low, r, "bfloat16", "float32")
    assert 0 < d.relative < 2.0**-8
    assert compare(r, r.astype(np.float64), "float32", "float64").error == 0.0
    assert compare(np.array([1, 2], np.int32), np.array([1, 3]), "int32", "int64").error == 1.0


def test_formats_that_the_kernel_lacks_are_converted() -> None:
    low = from_float(normal(100), "float8_e4m3fnuz")
    assert compare(low, low, "float8_e4m3fnuz").bit_equal


def test_zero_reference() -> None:
    d = compare(np.ones(3, np.float32), np.zeros(3, np.float32), "float32")
    assert d.relative == math.inf
    assert math.isnan(d.scale)
    assert compare(np.zeros(3, np.float32), np.zeros(3, np.float32), "float32").relative == 0.0


def test_empty_and_scalar_tensors() -> None:
    assert compare(np.empty((0, 4), np.float32), np.empty((0, 4), np.float32), "float32").bit_equal
    assert compare(np.float32(2.0).reshape(()), np.float32(3.0).reshape(()), "float32").error == 1.0


def test_unlike_tensors_are_refused() -> None:
    with pytest.raises(OracleError, match="shape"):
        compare(normal(4), normal(5), "float32")
    with pytest.raises(OracleError, match="stored"):
        compare(normal(4), normal(4), "bfloat16")
    with pytest.raises(OracleError):
        compare(normal(4), normal(4), "float7")


def test_residual_is_exact_where_sums_cancel() -> None:
    r = normal(1 << 12, 300)  # more than one piece
    assert residual(r * np.float32(2), r, "float32", 2.0) == 0.0
    assert residual(r, r, "float32", 0.5) == pytest.approx(0.5 * float(np.linalg.norm(r.astype(np.float64))), rel=1e-6)
