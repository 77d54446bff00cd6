"""How much may a tensor differ by rounding alone: estimated per tensor from runs of the reference with noise, never set by hand.

The noise is of one unit roundoff u, uniform and multiplicative, at every output and every gradient that is observed
(mode `all`), or at the embedding output alone, as in the paper (mode `paper`: TTrace, section 4.5; it injects nothing
into the backward pass and therefore needs a greater multiple). From the samples P_s of a tensor R:

    E = sqrt(mean over s of ‖P_s - R‖²)                         absolute: tensors that are zero up to rounding need no special case
    T = M · max(E, c·u·‖R‖, a)                                   M = 3 (all), 5 (paper)

A tensor is wrong if ‖C - R‖ > T. Tensors of a few elements, scalars above all, get the
multiple that so few numbers need to be sure. T / ‖R‖ ≥ 0.3 means that the comparison has no power, and is said, never passed over.
Integers are counted: ‖·‖ is the number of elements that differ, and nothing is allowed beyond what noise flips.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from proctor.errors import OracleError
from proctor.oracle.numbers.difference import Difference
from proctor.oracle.numbers.dtypes import is_floating

Mode = Literal["all", "paper"]

SCHEMA: Final = 1
MAX_BYTES: Final = 256 * 1024 * 1024
SAMPLES: Final = 4  # one sample underestimates a tensor by up to 2 ×, four by up to 1.25 ×

# u = 2^-p of p significant bits, which is also the RMS of the noise.
UNIT_ROUNDOFF: Final[dict[str, float]] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "complex128": 2.0**-53,
    "complex64": 2.0**-24,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}
# Least magnitude that survives: smallest normal where hardware flushes to zero, spacing of subnormals of short formats.
SMALLEST: Final[dict[str, float]] = {
    "float64": 2.0**-1022,
    "complex128": 2.0**-1022,
    "float16": 2.0**-24,
    "float8_e4m3fn": 2.0**-9,
    "float8_e4m3fnuz": 2.0**-10,
    "float8_e5m2": 2.0**-16,
    "float8_e5m2fnuz": 2.0**-17,
}
_SMALLEST_NORMAL: Final = 2.0**-126  # float32, bfloat16

# Worst correct tensor × implementation over 12 configurations of 4 to 64 layers: 2.2 E with `all`, 4.2 E with `paper`
# (12.8 E in fp8); every injected bug above 3.8 E except those below bf16's noise.
MULTIPLE: Final[dict[str, float]] = {"all": 3.0, "paper": 5.0}
PAPER_FP8_MULTIPLE: Final = 13.0
# How much of the true error a few samples may miss, relative to four: measured 2 ×, 1.5 ×, 1.25 ×.
FEW_SAMPLES: Final[dict[int, float]] = {1: 2.0 / 1.25, 2: 1.5 / 1.25, 3: 1.1}
# Tensors of one to eight elements: few numbers estimate their error badly, and it varies more itself. The root of the F
# quantile (n, samples·n degrees of freedom) that a correct candidate exceeds once in 10,000 times, by samples.
SMALL: Final[dict[int, tuple[float, ...]]] = {
    1: (6366.2, 99.99, 25.68, 13.11, 8.77, 6.70, 5.52, 4.77),
    2: (99.99, 14.07, 7.33, 5.24, 4.26, 3.68, 3.31, 3.04),
    3: (28.00, 7.85, 5.04, 3.97, 3.41, 3.06, 2.81, 2.63),
    4: (15.54, 6.00, 4.23, 3.48, 3.06, 2.79, 2.60, 2.45),
    8: (7.12, 4.16, 3.31, 2.89, 2.63, 2.45, 2.31, 2.21),
}
FP8_SHARE: Final = 0.25  # u_fp8/4: the noise at which fp8 needs the same multiple (a GEMM averages over its inputs)
COPY_SHARE: Final = 0.25  # c of what is only copied: gathers, parameters before the step
SCALAR_ULPS: Final = 4.0
NO_POWER: Final = 0.3  # T / ‖R‖ from which an error of the tensor's own size may hide
WARN: Final = 0.5  # err / T above which a tensor is remarked: M between 1.5 and 3


class TensorKey(NamedTuple):
    """Which tensor of a run (TTrace, section 4.1)."""

    step: int
    call: int
    kind: str
    name: str
    slot: str = ""


class Tolerance(msgspec.Struct, frozen=True):
    """What one tensor may differ by.

    Attributes:
        absolute: T.
        signal: what T is measured against: ‖R‖, of a parameter after the step the norm of its update.
        binding: which term decided: `noise`, `rounding`, `smallest`, or `unstable` where a noise run was not finite.
    """

    absolute: float
    signal: float
    binding: str = "noise"

    @property
    def relative(self) -> float:
        """T relative to the signal; infinite where that is zero."""
        return self.absolute / self.signal if self.signal > 0 else 0.0 if self.absolute == 0 else math.inf

    @property
    def powerless(self) -> bool:
        """Too wide to see an error."""
        return self.relative >= NO_POWER


def unit_roundoff(dtype: str, fp8: str = "") -> float:
    """u of a dtype, 0 for integers; with `fp8` (the format of its module's GEMM inputs) a quarter of that one's."""
    own = UNIT_ROUNDOFF.get(dtype, 0.0)
    return max(own, FP8_SHARE * UNIT_ROUNDOFF[fp8]) if fp8 in UNIT_ROUNDOFF and own else own


def tolerance(
    error: float,
    norm: float,
    dtype: str,
    kind: str = "",
    *,
    n: int = 1,
    mode: Mode = "all",
    samples: int = SAMPLES,
    fp8: str = "",
    copied: bool = False,
    signal: float | None = None,
) -> Tolerance:
    """T of one tensor.

    Args:
        error: E, estimated.
        norm: ‖R‖; of integers the number of elements.
        dtype: of the tensor.
        kind: of the tensor; `scalar` has a floor of its own.
        n: elements.
        mode: how the noise was injected.
        samples: behind E.
        fp8: format of the GEMM inputs of its module, "" for none.
        copied: it is moved and not computed.
        signal: what an error is to be seen in, `norm` if not given.
    """
    signal = norm if signal is None else signal
    multiple = MULTIPLE[mode] * FEW_SAMPLES.get(samples, 1.0)
    if mode == "paper" and fp8:
        multiple = max(multiple, PAPER_FP8_MULTIPLE)
    noisy = max(multiple, _small(n, samples))
    if not math.isfinite(error):
        return Tolerance(math.inf, signal, "unstable")
    if not is_floating(dtype):
        return Tolerance(multiple * error, signal, "noise")
    rounding = (COPY_SHARE if copied else 1.0) * unit_roundoff(dtype, fp8 if mode == "all" else "") * norm
    smallest = SMALLEST.get(dtype, _SMALLEST_NORMAL) * math.sqrt(max(n, 1))
    if kind == "scalar" or n == 1:
        smallest = max(smallest, SCALAR_ULPS * _ulp(norm, dtype))
    terms = (("noise", noisy * error), ("rounding", multiple * rounding), ("smallest", multiple * smallest))
    binding, bound = max(terms, key=lambda term: term[1])
    return Tolerance(bound, signal, binding)


def _small(n: int, samples: int) -> float:
    """The multiple of E that a tensor of few elements needs; 0 for larger ones."""
    if not 1 <= n <= 8:
        return 0.0
    row = max((k for k in SMALL if k <= samples), default=1)
    return SMALL[row][n - 1]


def _ulp(value: float, dtype: str) -> float:
    """Spacing of the numbers of a dtype at a magnitude."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return math.ldexp(2.0 * UNIT_ROUNDOFF.get(dtype, 0.0), math.frexp(value)[1] - 1)


class Noise(msgspec.Struct):
    """What the samples of one tensor differ by.

    Attributes:
        key: which tensor.
        dtype: its type.
        exact: integers, of which elements that differ are counted.
        sums: for each sample ‖P-R‖², of integers the count.
        broken: samples that were not finite where the reference is.
        slopes: for each way of cutting (`0:4` is dimension 0 in 4 parts) and part, the mean over samples of α².
        slope_samples: behind each of `slopes`.
    """

    key: TensorKey
    dtype: str
    exact: bool = False
    sums: dict[int, float] = {}
    broken: list[int] = []
    slopes: dict[str, list[float]] = {}
    slope_samples: dict[str, int] = {}

    @property
    def error(self) -> float:
        """E: root of the mean over the samples; infinite where one was not finite."""
        if self.broken:
            return math.inf
        squares = [v * v if self.exact else v for v in self.sums.values()]
        return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.inf


class _File(msgspec.Struct):
    schema: int
    mode: Mode
    tensors: list[Noise]
    about: dict[str, Any] = {}  # Any: JSON of whoever made it, to recognise what it belongs to


class Estimate:
    """Noise of every tensor of a program, from samples added in any order and in any pieces.

    Only sums are kept, so memory does not depend on the size of tensors.

    Args:
        mode: how the noise was injected.
        about: what it was made of (command, parameters), kept beside it for a cache.
    """

    def __init__(self, mode: Mode = "all", about: Mapping[str, Any] | None = None) -> None:
        self.mode: Mode = mode
        self.about = dict(about or {})
        self._noise: dict[TensorKey, Noise] = {}

    def __len__(self) -> int:
        return len(self._noise)

    def __contains__(self, key: TensorKey) -> bool:
        return key in self._noise

    def get(self, key: TensorKey) -> Noise | None:
        """Noise of a tensor, if a sample had it."""
        return self._noise.get(key)

    def add(self, key: TensorKey, sample: int, difference: Difference, dtype: str) -> None:
        """Take what a sample, or a piece of it, differs from the reference by.

        Args:
            key: which tensor.
            sample: number of the run with noise.
            difference: sample (as candidate) against reference.
            dtype: of the tensor.
        """
        noise = self._of(key, dtype, not difference.rounded)
        if difference.mismatch and sample not in noise.broken:
            noise.broken.append(sample)
        here = difference.diff_sq if difference.rounded else float(difference.unequal)
        noise.sums[sample] = noise.sums.get(sample, 0.0) + here

    def add_slopes(self, key: TensorKey, cut: str, alphas: Iterable[float], dtype: str) -> None:
        """Take the slopes of one sample for one way of cutting; see `slopes`."""
        noise = self._of(key, dtype)
        values = [a * a for a in alphas]
        n = noise.slope_samples.get(cut, 0)
        old = noise.slopes.get(cut, [0.0] * len(values))
        noise.slopes[cut] = [(o * n + v) / (n + 1) for o, v in zip(old, values, strict=True)]
        noise.slope_samples[cut] = n + 1

    def _of(self, key: TensorKey, dtype: str, exact: bool = False) -> Noise:
        if key not in self._noise:
            self._noise[key] = Noise(key, dtype, exact)
        return self._noise[key]

    def tolerance(
        self,
        key: TensorKey,
        difference: Difference,
        dtype: str,
        *,
        fp8: str = "",
        copied: bool = False,
        signal: float | None = None,
    ) -> Tolerance | None:
        """T of a tensor that was compared; `None` if no sample had it. Arguments as of `tolerance`."""
        noise = self._noise.get(key)
        if noise is None:
            return None
        return tolerance(
            noise.error,
            difference.size,
            dtype,
            key.kind,
            n=difference.n,
            mode=self.mode,
            samples=max(1, len(noise.sums)),
            fp8=fp8,
            copied=copied,
            signal=signal,
        )

    def to_json(self) -> bytes:
        """The estimate as a file for a cache."""
        return msgspec.json.encode(_File(SCHEMA, self.mode, list(self._noise.values()), self.about))

    @classmethod
    def from_json(cls, data: bytes, where: str = "estimate") -> Estimate:
        """Read what `to_json` wrote.

        Args:
            data: the file's content.
            where: its name, for messages.

        Raises:
            OracleError: too large, malformed, or of another schema.
        """
        if len(data) > MAX_BYTES:
            raise OracleError(f"{where}: larger than {MAX_BYTES // 2**20} MiB", hint="estimate again")
        try:
            file = msgspec.json.decode(data, type=_File)
        except msgspec.MsgspecError as e:
            raise OracleError(f"{where}: {e}", hint="estimate again") from None
        if file.schema != SCHEMA:
            raise OracleError(f"{where}: schema {file.schema}, this Proctor reads {SCHEMA}", hint="estimate again")
        made = cls(file.mode, file.about)
        for noise in file.tensors:
            if any(v < 0 or not math.isfinite(v) for v in noise.sums.values()):
                raise OracleError(f"{where}: an error of {noise.key.name} is neither a norm nor a count", hint="estimate again")
            made._noise[noise.key] = noise
        return made
