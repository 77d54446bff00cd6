"""How far is one tensor from another, and in what way: one pass over both, through the native kernel.

The sums of parts add up to those of the whole, so that a tensor may be compared piece by piece (`Difference.__add__`).
Floating point is measured by the Frobenius norm; integers and booleans, which are either right or wrong, by the number
of elements that differ. bfloat16 and the 8-bit floats come as raw integers beside the name of their dtype (`dtypes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.native import compare_buffers
from proctor.oracle.numbers.dtypes import as_float, is_floating, storage

Array = npt.NDArray[Any]

_PIECE: Final = 1 << 20  # elements at a time in double, 8 MiB a temporary
_CONVERTED: Final = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz"})  # the kernel does not read them


class Difference(msgspec.Struct, frozen=True):
    """Candidate beside reference.

    Attributes:
        n: elements (components of complex numbers).
        unequal: elements whose bits differ.
        diff_sq, candidate_sq, reference_sq, dot: sums over the elements that are finite on both sides.
        max_diff, max_reference: greatest |difference| of those (good to 1e-6: 32-bit numbers may be subtracted as such), greatest
            finite |reference|.
        nonfinite_candidate, nonfinite_reference: elements that are NaN or infinite.
        mismatch: elements not finite on one side, and not the same (NaN, +inf, -inf) on the other.
        rounded: floating point; else exact.
    """

    n: int
    unequal: int
    diff_sq: float
    candidate_sq: float
    reference_sq: float
    dot: float
    max_diff: float
    max_reference: float
    nonfinite_candidate: int
    nonfinite_reference: int
    mismatch: int
    rounded: bool = True

    def __add__(self, other: Difference) -> Difference:
        """Of both parts together."""
        return Difference(
            self.n + other.n,
            self.unequal + other.unequal,
            self.diff_sq + other.diff_sq,
            self.candidate_sq + other.candidate_sq,
            self.reference_sq + other.reference_sq,
            self.dot + other.dot,
            max(self.max_diff, other.max_diff),
            max(self.max_reference, other.max_reference),
            self.nonfinite_candidate + other.nonfinite_candidate,
            self.nonfinite_reference + other.nonfinite_reference,
            self.mismatch + other.mismatch,
            self.rounded and other.rounded,
        )

    @property
    def bit_equal(self) -> bool:
        """Every bit is the same."""
        return self.unequal == 0

    @property
    def error(self) -> float:
        """‖C-R‖; of integers, how many elements differ."""
        return math.sqrt(self.diff_sq) if self.rounded else float(self.unequal)

    @property
    def size(self) -> float:
        """‖R‖; of integers, how many elements there are."""
        return math.sqrt(self.reference_sq) if self.rounded else float(self.n)

    @property
    def relative(self) -> float:
        """Error relative to the reference; infinite where that is zero."""
        return 0.0 if self.error == 0 else self.error / self.size if self.size > 0 else math.inf

    @property
    def scale(self) -> float:
        """α for which α·R is closest to C; NaN where the reference is zero."""
        return self.dot / self.reference_sq if self.reference_sq > 0 else math.nan


def compare(candidate: Array, reference: Array, dtype: str, reference_dtype: str = "") -> Difference:
    """Compare two tensors of one shape.

    Args:
        candidate: as stored, any layout.
        reference: likewise.
        dtype: torch's name of the candidate's type.
        reference_dtype: of the reference, where it is another; values are then compared in float32 or float64.

    Raises:
        OracleError: shapes differ, or an unknown dtype.
    """
    reference_dtype = reference_dtype or dtype
    if candidate.shape != reference.shape:
        raise OracleError(f"shape {list(candidate.shape)} cannot be compared with {list(reference.shape)}")
    if dtype != reference_dtype:
        floating = is_floating(dtype) or is_floating(reference_dtype)
        wide = np.result_type(_widened(dtype), _widened(reference_dtype)) if floating else np.dtype(np.int64)
        candidate, reference = (_as(x, d, wide) for x, d in ((candidate, dtype), (reference, reference_dtype)))
        dtype = wide.name
    elif dtype in _CONVERTED:
        candidate, reference, dtype = as_float(candidate, dtype), as_float(reference, dtype), "float32"
    if not candidate.dtype == reference.dtype == storage(dtype):
        raise OracleError(f"values of {dtype} are stored as {storage(dtype).name}, not as {candidate.dtype.name} and {reference.dtype.name}")
    sums = compare_buffers(np.ascontiguousarray(candidate), np.ascontiguousarray(reference), dtype)
    return Difference(*sums, rounded=is_floating(dtype))


def residual(candidate: Array, reference: Array, dtype: str, scale: float, reference_dtype: str = "") -> float:
    """‖C - scale·R‖ over what is finite, in double: a second pass, for tensors that are wrong already."""
    total = 0.0
    for x, y in _pieces(candidate, reference, dtype, reference_dtype or dtype):
        d = x - scale * y
        total += float(d @ d)
    return math.sqrt(total)


def exact_scale(candidate: Array, reference: Array, dtype: str, reference_dtype: str = "") -> float:
    """α for which α·R is closest to C, in double; `Difference.scale` is good to 1e-7 only."""
    along = square = 0.0
    for x, y in _pieces(candidate, reference, dtype, reference_dtype or dtype):
        along += float(x @ y)
        square += float(y @ y)
    return along / square if square > 0 else math.nan


def _pieces(candidate: Array, reference: Array, dtype: str, reference_dtype: str) -> Iterator[tuple[Array, Array]]:
    a, b = np.ascontiguousarray(candidate).reshape(-1), np.ascontiguousarray(reference).reshape(-1)
    for low in range(0, a.size, _PIECE):
        x = as_float(a[low : low + _PIECE], dtype).astype(np.float64).reshape(-1)
        y = as_float(b[low : low + _PIECE], reference_dtype).astype(np.float64).reshape(-1)
        fine = np.isfinite(x) & np.isfinite(y)
        yield (x, y) if fine.all() else (x[fine], y[fine])


def _widened(dtype: str) -> np.dtype[Any]:
    return as_float(np.empty(0, storage(dtype)), dtype).dtype


def _as(array: Array, dtype: str, wide: np.dtype[Any]) -> Array:
    if wide.kind in "iu":
        return array.astype(wide)
    return as_float(array, dtype).astype(wide, copy=False)
