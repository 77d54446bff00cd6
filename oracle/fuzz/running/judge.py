"""Is what a rank holds what the reference holds? On the rank, in memory, tensor by tensor.

In double precision healthy runs agree to 1e-15 and mistakes begin at 1e-4, so the band between can be wide. It is the larger of a floor for
the precision and of the noise: how far the reference itself moves when its rows come in another order. That makes
ill-conditioned programs (sign-like updates of gradients that are mathematically zero, an optimizer that rounds to bfloat16) judge
themselves. Source: `TTrace`'s noise, applied to whole programs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from proctor.oracle.fuzz.running.observe import KINDS, Array, Seen
from proctor.oracle.numbers.explain import explain_difference

FLOORS: Final = {"torch.float64": 2e-7, "torch.float32": 1e-4, "autocast": 0.1}
NOISE: Final = 16.0  # times the largest movement of the reference under a permutation
SHAKEN: Final = 8 * 2.0**-52  # of the largest gradient: how far gradients of noise runs are moved at least, 8 spacings
OWN: Final = 4.0  # times the largest movement of the reference when each operation is rounded otherwise (`rounding`)
RUNS: Final = 8  # of the reference that are rounded otherwise
MISSING: Final = 1e300
_SMALL: Final = 1e-3  # of the largest element of a kind: below it a tensor is taken for zero
_COARSE: Final = 0.05  # floors from here on are of bfloat16
_FIRST: Final = ("output", "gradient", "clipped")  # kinds before the first update
STEADY: Final = ("SGD",)  # optimizers that do not make noise larger
MAX_REPORTED: Final = 40


class Difference(msgspec.Struct, frozen=True):
    """A tensor that is not the reference's.

    Attributes:
        step: of training.
        kind: of `observe.KINDS`.
        name: of the tensor.
        error: largest difference; `MISSING` where there is nothing to compare, or nothing finite.
        allowed: what it might have been.
        largest: the reference's largest element.
        way: how the two are related, in words; "" if nothing simple holds.
        module: class of the module that owns it.
        candidate, reference: the element that differs most, of both, as text (it may be NaN).
        rank: that holds it.
        noise: how far the program's own rounding moves it; negative where that was not asked.
    """

    step: int
    kind: str
    name: str
    error: float
    allowed: float
    largest: float
    way: str = ""
    module: str = ""
    candidate: str = ""
    reference: str = ""
    rank: int = 0
    noise: float = -1.0

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands in the course of a run."""
        return self.step, KINDS.index(self.kind)

    @property
    def rounding(self) -> bool:
        """Whether it is no larger than what the program's own rounding makes."""
        return self.noise >= 0 and self.error <= OWN * self.noise


class Reference:
    """The reference's tensors, their noise, and how large tensors of a kind are."""

    def __init__(self, tensors: Mapping[str, Array], noise: Mapping[str, float], floor: float, *, steady: bool, own: Mapping[str, float] | None = None) -> None:
        self.tensors, self.noise, self.floor, self.steady, self.own = tensors, noise, floor, steady, own
        self.sizes: dict[str, float] = {}
        self._largest = {key: largest(values) for key, values in tensors.items()}
        for key, size in self._largest.items():
            kind = key.split("/")[1]
            self.sizes[kind] = max(self.sizes.get(kind, 0.0), size)
        self._allowed: dict[tuple[str, float], float] = {}
        self._gradients: dict[int, list[str]] = {}
        for key, values in tensors.items():
            number, kind, name = key.split("/", 2)
            if kind == "gradient" and np.any(values):
                self._gradients.setdefault(int(number), []).append(name)

    def missing(self, found: set[str], step: int) -> list[str]:
        """Names of gradients of a step that are not all zeros, and that no rank showed."""
        return [name for name in self._gradients.get(step, ()) if name not in found]

    def lost(self, step: int, name: str) -> Difference:
        """A gradient of `missing`."""
        noise = -1.0 if self.own is None else self.own.get(f"{step}/gradient/{name}", 0.0)
        return Difference(step, "gradient", name, MISSING, 0.0, 0.0, "no gradient", noise=noise)

    def allowed(self, key: str, floor: float) -> float:
        """The largest difference that is no mistake."""
        found = self._allowed.get((key, floor))
        if found is None:
            size = max(self._largest[key], _SMALL * self.sizes[key.split("/")[1]])
            found = self._allowed[key, floor] = max(floor * size, NOISE * self.noise.get(key, 0.0))
        return found


def unit_of(tolerance: float, precision: str) -> float:
    """One unit in the last place of the type that a candidate computes in, relative.

    Args:
        tolerance: declared for the setting; 0 for none. What is declared is of bfloat16 or of single precision.
        precision: of `FLOORS`; autocast rounds to bfloat16 by itself, and keeps the rest in single precision.
    """
    if tolerance >= _COARSE:
        return 2.0**-7
    return 2.0**-52 if precision == "torch.float64" and not tolerance else 2.0**-23


def key_of(step: int, seen: Seen) -> str:
    """Of a tensor in a reference."""
    return f"{step}/{seen.kind}/{seen.name}"


def largest(values: Array) -> float:
    """Largest finite |element|."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return float(np.abs(finite).max()) if finite.size else 0.0


def judge(seen: Seen, step: int, reference: Reference, tolerance: float) -> Difference | None:
    """Compare one tensor; with how far the program's own rounding moves it, where that is known of the reference.

    Args:
        seen: of a rank.
        step: of training.
        reference: all of it.
        tolerance: declared for the setting; 0 for none.
    """
    found = _judged(seen, step, reference, tolerance)
    if found is None or reference.own is None:
        return found
    return msgspec.structs.replace(found, noise=reference.own.get(key_of(step, seen), 0.0))


def _judged(seen: Seen, step: int, reference: Reference, tolerance: float) -> Difference | None:
    key = key_of(step, seen)
    floor = max(reference.floor, tolerance)
    if floor >= _COARSE and not reference.steady and (step > 0 or seen.kind not in _FIRST):
        return None  # rounding grows beyond any bound in an update that divides by what is nearly nothing; in single precision the noise tells how far
    whole = reference.tensors.get(key)
    if whole is None:
        # A rank may have a gradient of zeros where the reference has none: the reducer makes one of an unused parameter.
        # A buffer that it has not is the wrapper's own.
        empty = seen.kind in ("gradient", "clipped") and not np.any(seen.values)
        return None if empty or seen.kind == "buffer" else Difference(step, seen.kind, seen.name, MISSING, 0.0, 0.0, "the reference has none")
    wanted = whole if seen.index is None else whole[seen.index]
    if wanted.shape != seen.values.shape:
        if wanted.size != seen.values.size:
            return Difference(step, seen.kind, seen.name, MISSING, 0.0, 0.0, f"shape {list(seen.values.shape)} for {list(wanted.shape)}")
        wanted = wanted.reshape(seen.values.shape)
    if not seen.values.size:
        return None
    allowed = reference.allowed(key, floor)
    if wanted.dtype.kind == "f" and np.abs(seen.values - wanted).max() <= allowed:
        return None
    return _measured(seen, step, wanted, allowed)


def _measured(seen: Seen, step: int, wanted: Array, allowed: float) -> Difference | None:
    with np.errstate(invalid="ignore"):
        apart = np.abs(seen.values - wanted)
    same = (seen.values == wanted) | (np.isnan(seen.values) & np.isnan(wanted)) if wanted.dtype.kind == "f" else seen.values == wanted
    apart = np.where(same, 0.0, np.nan_to_num(apart, nan=MISSING, posinf=MISSING))
    worst = int(apart.argmax())
    error = float(apart.reshape(-1)[worst])
    if error <= allowed:
        return None
    return Difference(
        step, seen.kind, seen.name, error, allowed, largest(wanted), _way(seen, wanted, allowed),
        candidate=f"{seen.values.reshape(-1)[worst]:.8g}", reference=f"{wanted.reshape(-1)[worst]:.8g}",
    )


def _way(seen: Seen, wanted: Array, allowed: float) -> str:
    candidate, reference = (np.ascontiguousarray(v, dtype=np.float64) for v in (seen.values, wanted))
    kind = "grad_output" if seen.kind in ("gradient", "clipped") else seen.kind
    return explain_difference(candidate, reference, "float64", kind, allowed * max(1.0, wanted.size**0.5))


def digest(seen: Seen) -> tuple[str, int]:
    """What ranks that hold the same must have in common: the place, and a checksum of the bits."""
    place = ""
    if isinstance(seen.index, tuple):
        place = ",".join(f"{s.start}:{s.stop}" if isinstance(s, slice) else str(zlib.crc32(s.tobytes())) for s in seen.index)
    return f"{seen.kind}/{seen.name}|{place}", zlib.crc32(np.ascontiguousarray(seen.values).tobytes())


