"""In what way is a tensor wrong: a wrong factor, a missing sum, nothing but zeros, an old value, or only a part of it.

Runs on tensors that are wrong already, so it may look more than once. A note is given only if the relation holds within
the tolerance that the tensor itself was judged by; what holds by chance at a wide tolerance is not said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proctor.oracle.numbers.difference import Difference, compare, exact_scale, residual
from proctor.oracle.numbers.dtypes import as_float, is_floating

Array = npt.NDArray[Any]

GRADIENTS: Final = frozenset({"grad_output", "grad_input", "main_grad"})
MAX_ELEMENTS: Final = 1 << 24  # of a tensor that is searched for a region or sorted, 128 MiB in double
_LARGEST: Final = 4096  # factor n or 1/n: world sizes, microbatches, loss scales
_SUMS: Final = 1e-6  # relative: what the kernel's sums are good to, with room
_ANGLE: Final = 1e-3  # the root of it
_SHUFFLED: Final = 0.05  # of ‖R‖/√n: sorted values of two independent tensors of one distribution are ~1 apart
_PART: Final = 0.75  # of a dimension, above which a region is not worth naming


def explain_difference(
    candidate: Array,
    reference: Array,
    dtype: str,
    kind: str,
    tolerance: float,
    *,
    difference: Difference | None = None,
    parts: Sequence[Array] = (),
    axis: str = "",
    earlier: Mapping[str, Array] | None = None,
) -> str:
    """A short note on how candidate and reference are related; "" if nothing simple holds.

    Args:
        candidate: as stored, of the reference's shape and dtype.
        reference: likewise.
        dtype: torch's name of it.
        kind: of the tensor; gradients say `gradient scale N`.
        tolerance: T, absolute.
        difference: of the two, if it is known already.
        parts: what the ranks of `axis` hold where they should hold the same.
        axis: mesh axis of `parts`.
        earlier: other tensors that it may be by mistake, by what they are ("step 0").
    """
    d = difference if difference is not None else compare(candidate, reference, dtype)
    if d.mismatch:
        return nonfinite_note(d)
    if not is_floating(dtype):
        return _joined([f"{d.unequal:,} of {d.n:,} elements differ", _region(candidate, reference, dtype, 0.0, "")])
    if d.error <= tolerance or not math.isfinite(tolerance):
        return ""
    size = d.size
    if math.sqrt(d.candidate_sq) <= tolerance:
        return "zero"
    if size <= tolerance:
        return "the reference is zero"
    for name, other in (earlier or {}).items():
        if other.shape == candidate.shape and compare(candidate, other, dtype).error <= tolerance:
            return f"stale: the value of {name}"
    summed = _partial(parts, reference, dtype, tolerance, axis)
    if summed:
        return summed
    return _factor(candidate, reference, dtype, tolerance, kind, d) or _joined(
        [_region(candidate, reference, dtype, tolerance, kind) or _shuffled(candidate, reference, dtype, min(2 * tolerance, _SHUFFLED * size / math.sqrt(d.n)))]
    )


def nonfinite_note(d: Difference) -> str:
    """Which side is not finite, and how much of it."""
    if not d.nonfinite_reference:
        return f"{d.nonfinite_candidate:,} of {d.n:,} elements are NaN or infinite"
    if not d.nonfinite_candidate:
        return f"{d.nonfinite_reference:,} of {d.n:,} elements of the reference are NaN or infinite"
    return f"{d.nonfinite_candidate:,} elements are NaN or infinite, {d.nonfinite_reference:,} of the reference"


def rationals() -> list[Fraction]:
    """Factors that mistakes have, simplest first: n, 1/n, p/q of small numbers, and their negatives."""
    whole = [Fraction(n) for n in range(2, _LARGEST + 1)]
    small = [Fraction(p, q) for q in range(2, 17) for p in range(2, 17) if p != q]
    found = {Fraction(-1), *whole, *(1 / f for f in whole), *small}
    return sorted(found, key=lambda f: (abs(f.numerator) + f.denominator, f))


_RATIONALS: Final = rationals()
_VALUES: Final = np.array([float(f) for f in _RATIONALS])


def _factor(candidate: Array, reference: Array, dtype: str, tolerance: float, kind: str, d: Difference) -> str:
    """The factor by which one is the other; none that the tolerance cannot tell from no factor at all."""
    alpha, size = d.scale, d.size
    if not math.isfinite(alpha):
        return ""
    word = "gradient scale" if kind in GRADIENTS else "scale"

    def holds(factor: float) -> bool:
        apart = abs(factor - 1) * size > 2 * tolerance
        return apart and residual(candidate, reference, dtype, factor) <= tolerance * max(1.0, abs(factor))

    near = np.abs(alpha - _VALUES) * size <= (tolerance + _SUMS * size) * np.maximum(1.0, np.abs(_VALUES))
    for i in np.flatnonzero(near)[:4]:
        if holds(float(_VALUES[i])):
            return f"{word} {_RATIONALS[i]}"
    # The error of the best factor is what of C is at a right angle to R.
    if math.sqrt(max(0.0, d.candidate_sq - alpha * d.dot)) > 2 * tolerance * max(1.0, abs(alpha)) + _ANGLE * math.sqrt(d.candidate_sq):
        return ""
    exact = exact_scale(candidate, reference, dtype)
    return f"{word} {exact:.4g}" if holds(exact) else ""


def _partial(parts: Sequence[Array], reference: Array, dtype: str, tolerance: float, axis: str) -> str:
    if len(parts) < 2 or any(p.shape != reference.shape for p in parts):
        return ""
    total = np.sum([as_float(p, dtype).astype(np.float64) for p in parts], axis=0)
    wanted = as_float(reference, dtype).astype(np.float64)
    where = f"axis {axis}" if axis else "the ranks"
    if float(np.linalg.norm(total - wanted)) <= 2 * tolerance:
        return f"partial sum: the values of {where} add up to the reference, a sum over them is missing"
    if float(np.linalg.norm(total / len(parts) - wanted)) <= 2 * tolerance:
        return f"partial mean: the mean over {where} is the reference, an average over them is missing"
    return ""


def _region(candidate: Array, reference: Array, dtype: str, tolerance: float, kind: str) -> str:
    """Where the error is, if that is only a part of a dimension, and how the part is related."""
    if candidate.ndim == 0 or candidate.size > MAX_ELEMENTS:
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        c, r = (as_float(x, dtype).astype(np.float64) for x in (candidate, reference))
        squares = np.nan_to_num((c - r) ** 2).reshape(*candidate.shape, -1).sum(axis=-1)
        least = np.square(np.float64(tolerance))  # that of values that left all bounds has no square
    box: list[slice] = []
    words: list[str] = []
    for dim, extent in enumerate(candidate.shape):
        along = squares.sum(axis=tuple(i for i in range(squares.ndim) if i != dim))
        wrong = np.flatnonzero(along > least / extent)
        low, high = (int(wrong[0]), int(wrong[-1]) + 1) if wrong.size else (0, extent)
        if extent > 1 and wrong.size and high - low <= _PART * extent:
            box.append(slice(low, high))
            words.append(f"dim {dim} [{low}:{high}] of {extent}")
        else:
            box.append(slice(None))
            if wrong.size and extent > 1 and wrong.size <= _PART * extent:
                words.append(f"{wrong.size:,} of {extent:,} slices of dim {dim}")
    if not words:
        return ""
    inner, cut = candidate[tuple(box)], reference[tuple(box)]
    how = ""
    if tolerance > 0 and any(b != slice(None) for b in box):
        inside = compare(inner, cut, dtype)
        if math.sqrt(inside.candidate_sq) <= tolerance:
            how = "zero"
        elif inside.size > tolerance:
            how = _factor(inner, cut, dtype, tolerance, kind, inside)
    return f"only in {', '.join(words)}" + (f": {how}" if how else "")


def _shuffled(candidate: Array, reference: Array, dtype: str, bound: float) -> str:
    if candidate.size > MAX_ELEMENTS or candidate.size < 2:
        return ""
    c, r = (np.sort(as_float(x, dtype).astype(np.float64), axis=None) for x in (candidate, reference))
    if float(np.linalg.norm(c - r)) <= bound:
        return "the same values in another order"
    return ""


def _joined(notes: Sequence[str]) -> str:
    return "; ".join(n for n in notes if n)
