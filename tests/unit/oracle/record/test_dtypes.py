from __future__ import annotations

import numpy as np
import pytest

from proctor.errors import OracleError
from proctor.oracle.numbers.dtypes import as_float, from_float, is_floating, storage

NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_is_what_torch_reads(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(65536 if dtype == "bfloat16" else 256).astype(storage(dtype))
    theirs = torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).to(torch.float32).numpy()
    assert np.array_equal(as_float(bits, dtype), theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_torch_s(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(20000) * 10.0 ** rng.integers(-8, 7, 20000)).astype(np.float32)
    ties = as_float(np.arange(0, 127, dtype=np.uint8), "float8_e4m3fn")
    ties = (ties[1:] + ties[:-1]) / 2
    values = np.concatenate([values, ties, -ties, [0.0, -0.0, np.inf, -np.inf, 464.0, 465.0, 480.0, 240.0, 61440.0, 57344.0]]).astype(np.float32)
    if dtype == "float8_e4m3fn":  # what is too large becomes NaN in some versions of torch and 448 in others
        values = values[np.abs(values) <= 464]
        assert np.isnan(as_float(from_float(np.float32([465, np.inf]), dtype), dtype)).all()
    theirs = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    ours = as_float(from_float(values, dtype), dtype)
    assert np.array_equal(ours, theirs, equal_nan=True), values[~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))][:10]
    assert np.isnan(as_float(from_float(np.float32([np.nan]), dtype), dtype)).all()


def test_sums_in_float64_are_rounded_once() -> None:
    # Just above a tie of bfloat16, by less than float32 resolves: rounding twice would fall back on the tie.
    value = np.float64([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 2.0**-8 - 2.0**-40, -1 - 2.0**-8 - 2.0**-40])
    assert as_float(from_float(value, "bfloat16"), "bfloat16").tolist() == [1 + 2.0**-7, 1.0, 1.0, -1 - 2.0**-7]


def test_other_dtypes() -> None:
    assert as_float(np.float16([1.5])).dtype == np.float32
    assert as_float(np.int64([2**40])).tolist() == [2.0**40]
    assert as_float(np.array([True])).tolist() == [1.0]
    assert as_float(np.complex64([1 + 2j])).tolist() == [[1.0, 2.0]]
    assert from_float(np.float64([[1.0, 2.0]]), "complex64").tolist() == [1 + 2j]
    assert from_float(np.float64([2.6]), "int64").tolist() == [3]
    assert is_floating("bfloat16") and is_floating("float8_e5m2") and not is_floating("int64")
    assert as_float(np.asarray(7, np.uint8), "float8_e4m3fn").shape == ()


def test_what_cannot_be_read_is_refused() -> None:
    for array, dtype in ((np.float32([1]), "bfloat16"), (np.float32([1]), "float4_e2m1fn_x2"), (np.array(["a"]), "")):
        with pytest.raises(OracleError):
            as_float(array, dtype)
