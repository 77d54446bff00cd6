"""Floating-point formats as numpy sees them: bf16 and fp8 travel as raw bits beside the name of their dtype.

Names are torch's ("float32", "bfloat16", "float8_e4m3fn", "int64"). Formats: OCP 8-bit floating point specification
(e4m3fn has no infinities and one NaN pattern a sign; e5m2 is IEEE-like); bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError

Array = npt.NDArray[Any]

# exponent bits, mantissa bits, bias, whether the top exponent holds infinities and NaN, whether 0x80 is the only NaN
_FP8: Final[dict[str, tuple[int, int, int, bool, bool]]] = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}
_PLAIN: Final = frozenset(
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128".split()
)


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which values of a torch dtype are held.

    Raises:
        OracleError: a dtype that the oracle does not know.
    """
    if dtype == "bfloat16":
        return np.dtype(np.uint16)
    if dtype in _FP8:
        return np.dtype(np.uint8)
    if dtype in _PLAIN:
        return np.dtype(dtype)
    raise OracleError(f"dtype {dtype[:40]!r} is not one that the oracle can read")


def is_floating(dtype: str) -> bool:
    """Whether values are rounded: floating point, complex included."""
    return dtype.startswith(("float", "bfloat", "complex"))


def as_float(array: Array, dtype: str = "") -> Array:
    """The values as float32, or as float64 where float32 does not hold them (float64, integers); complex as pairs.

    Args:
        array: as stored.
        dtype: torch's name of it; "" for an array that is its own dtype.

    Raises:
        OracleError: an unknown dtype, or an array that is not stored as that dtype is.
    """
    dtype = dtype or array.dtype.name
    if array.dtype != storage(dtype):
        raise OracleError(f"values of {dtype} are stored as {storage(dtype).name}, not as {array.dtype.name}")
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FP8:
        return np.asarray(_table(dtype)[array])
    if dtype.startswith("complex"):
        return np.stack((array.real, array.imag), axis=-1)
    if dtype in ("float16", "float32"):
        return array.astype(np.float32, copy=False)
    return array.astype(np.float64, copy=False)


def from_float(values: Array, dtype: str) -> Array:
    """Rounds real values to a dtype, to nearest, ties to even; what is too large overflows as the format does.

    Raises:
        OracleError: an unknown dtype.
    """
    to = storage(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            return _to_bfloat16(np.asarray(values))
        if dtype in _FP8:
            return _to_fp8(np.asarray(values), dtype)
        if dtype.startswith("complex"):
            return np.asarray(values[..., 0] + 1j * values[..., 1]).astype(to)
        return (np.asarray(values) if is_floating(dtype) else np.rint(values)).astype(to)


def _to_bfloat16(values: Array) -> Array:
    # Round to odd on the way to float32, so that the second rounding is that of the exact value.
    narrow = values.astype(np.float32)
    if values.dtype.itemsize > 4:
        off = (narrow.astype(np.float64) != values) & np.isfinite(narrow)
        bits = narrow.view(np.uint32)
        away = np.abs(narrow.astype(np.float64)) > np.abs(values)
        bits = np.where(off & away, bits - np.uint32(1), bits)
        narrow = np.where(off, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)
    bits = narrow.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(narrow), quiet, rounded).astype(np.uint16)


def _to_fp8(values: Array, dtype: str) -> Array:
    table = _table(dtype)
    codes = np.flatnonzero(np.isfinite(table[:128])).astype(np.uint8)
    grid = table[codes].astype(np.float64)
    size = np.abs(values.astype(np.float64))
    at = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[at - 1], grid[at]
    up = (size - low > high - size) | ((size - low == high - size) & (codes[at] % 2 == 0))
    code = np.where(up, codes[at], codes[at - 1])
    top = grid[-1] + (grid[-1] - grid[-2]) / 2
    beyond = np.uint8(0x80 if _FP8[dtype][4] else 0x7C if _FP8[dtype][3] else 0x7F)
    code = np.where(size > top if codes[-1] % 2 == 0 else size >= top, beyond, code)
    sign = np.where(np.signbit(values) & ~((code == 0) & _FP8[dtype][4]), np.uint8(0x80), np.uint8(0))
    code = np.where(np.isnan(values), np.uint8(0x80 if _FP8[dtype][4] else 0x7F), code | sign)
    return code.astype(np.uint8)


@functools.cache
def _table(dtype: str) -> npt.NDArray[np.float32]:
    exponent_bits, mantissa_bits, bias, infinities, unsigned_zero = _FP8[dtype]
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias)))
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        size = np.where(top, np.where(mantissa == 0, np.inf, np.nan), size)
    elif not unsigned_zero:
        size = np.where(code & 0x7F == 0x7F, np.nan, size)
    values = np.where(code & 0x80, -size, size)
    if unsigned_zero:
        values[0x80] = np.nan
    table = values.astype(np.float32)
    table.flags.writeable = False
    return table
