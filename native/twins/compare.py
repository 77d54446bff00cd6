"""The comparison of `compare.h` in numpy: oracle of the native one, and what runs where it was not built.

Same function, same counts; sums agree to 1e-6 relative (fp32 lanes there, float64 here), at about a fiftieth of the
speed. Works through the buffers in pieces, so that temporaries stay small.
"""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Sums = tuple[int, int, float, float, float, float, float, float, int, int, int]

_PIECE: Final = 1 << 20  # elements at a time, 8 MiB a temporary

_STORED: Final = {  # how an element lies in memory
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "complex64": "f4",
    "complex128": "f8",
    "bool": "u1",
    **{f"{sign}int{8 * size}": f"{letter}{size}" for sign, letter in (("", "i"), ("u", "u")) for size in (1, 2, 4, 8)},
}


def e4m3fn_values() -> NDArray[np.float32]:
    """The 256 values of float8_e4m3fn: no infinities, NaN at 0x7F and 0xFF (OCP FP8 specification, table 1)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    magnitude[code & 0x7F == 0x7F] = np.nan
    values: NDArray[np.float32] = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    return values


_E4M3FN: Final = e4m3fn_values()


def _numbers(stored: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype == "float8_e4m3fn":
        stored = _E4M3FN[stored]
    elif dtype == "float8_e5m2":  # the upper half of a float16
        stored = (stored.astype(np.uint16) << np.uint16(8)).view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide: NDArray[np.float64] = stored.astype(np.float64)
        return wide


def _apart(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|a-b| of integers, exact before it is rounded to a double."""
    whole = f"u{a.dtype.itemsize}"
    x, y = a.view(whole), b.view(whole)
    apart: NDArray[np.float64] = np.where(a > b, x - y, y - x).astype(np.float64)
    return apart


def compare_buffers(candidate: NDArray[Any] | Buffer, reference: NDArray[Any] | Buffer, dtype: str, *, simd: str | None = None) -> Sums:
    """Count, differing elements, sums, maxima and non-finite counts of two buffers (`compare.h`); `simd` is ignored.

    Raises:
        ValueError: unknown dtype, buffers of different sizes or of no whole number of elements.
        BufferError: a buffer is not contiguous.
    """
    if dtype not in _STORED:
        raise ValueError(f'dtype is "{dtype}", which is not one of those compared')
    views = [memoryview(cast(Any, x)) for x in (candidate, reference)]  # Any: numpy 2 types __buffer__ from Python 3.12
    if any(not v.c_contiguous for v in views):
        raise BufferError("a buffer is not contiguous")
    if views[0].nbytes != views[1].nbytes:
        raise ValueError(f"buffers of {views[0].nbytes} and {views[1].nbytes} bytes cannot be compared")
    stored = np.dtype(_STORED[dtype])
    if views[0].nbytes % stored.itemsize:
        raise ValueError(f"{views[0].nbytes} bytes are no whole number of elements of {dtype}")
    a, b = (np.frombuffer(v, dtype=np.uint8).view(stored) if v.nbytes else np.empty(0, stored) for v in views)
    counts = np.zeros(4, dtype=np.int64)  # unequal, nonfinite a, nonfinite b, mismatch
    sums = np.zeros(4)
    max_d = max_b = 0.0
    for low in range(0, a.size, _PIECE):
        x, y = a[low : low + _PIECE], b[low : low + _PIECE]
        bits = f"u{stored.itemsize}"
        counts[0] += np.count_nonzero(x.view(bits) != y.view(bits))
        u, v = _numbers(x, dtype), _numbers(y, dtype)
        fine_u, fine_v = np.isfinite(u), np.isfinite(v)
        both = fine_u & fine_v
        counts[1:3] += np.count_nonzero(~fine_u), np.count_nonzero(~fine_v)
        counts[3] += np.count_nonzero(~both & (u != v) & ~(np.isnan(u) & np.isnan(v)))
        if both.any():
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                d = _apart(x, y) if stored.kind in "iu" and dtype in _INTEGERS else u[both] - v[both]
                p, q = u[both], v[both]
                sums += (d * d).sum(), (p * p).sum(), (q * q).sum(), (p * q).sum()
                max_d = max(max_d, float(np.abs(d).max()))
        if fine_v.any():
            max_b = max(max_b, float(np.abs(v[fine_v]).max()))
    dd, aa, bb, ab = sums.tolist()
    unequal, nonfinite_a, nonfinite_b, mismatch = counts.tolist()
    return a.size, unequal, dd, aa, bb, ab, max_d, max_b, nonfinite_a, nonfinite_b, mismatch


_INTEGERS: Final = frozenset(name for name in _STORED if "int" in name or name == "bool")
