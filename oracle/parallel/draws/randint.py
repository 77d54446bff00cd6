"""`random_`: under `torch.randint`, `randint_like`."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits

# Whole numbers that a floating-point dtype holds one by one: 2**digits, what `random_()` without bounds covers.
_DIGITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_ONE_WORD: Final = 1 << 32


class _Integers(Elementwise):
    """low + word mod (high − low); two words where the range exceeds 2³². The bias is range/2³²."""

    def keyed(self, bits: Bits, dtype: torch.dtype, low: int | None, high: int | None) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        if low is None:
            low, high = 0, _most(dtype)
        if high is None:
            high = _most(dtype)
        span = high - low
        if span <= _ONE_WORD:
            return torch.from_numpy((bits.words()[:, 0].astype(np.uint64) % np.uint64(span)).astype(np.int64)).add_(low)
        pair = bits.words(2, domain=1).astype(np.uint64)
        return torch.from_numpy((((pair[:, 0] << np.uint64(32)) | pair[:, 1]) % np.uint64(span)).astype(np.int64)).add_(low)

    def kernel(self, out: torch.Tensor, low: int | None, high: int | None, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        if low is None:
            out.random_(generator=generator)
        else:
            out.random_(low, high, generator=generator)

    def variety(self, low: int | None, high: int | None) -> str:
        """See `Elementwise.variety`."""
        return "all" if low is None else "open" if high is None else "wide" if high - low >= _ONE_WORD else "narrow"


def _most(dtype: torch.dtype) -> int:
    if dtype in _DIGITS:
        return int(2 ** _DIGITS[dtype] + 1)
    return 2 if dtype == torch.bool else int(torch.iinfo(dtype).max) + (dtype != torch.int64)


@register("random_.from")
class RandomFrom(_Integers):
    """Between two bounds."""

    def arguments(self, low: int, to: int | None) -> tuple[int, int | None]:
        """The bounds; None for all that the dtype holds."""
        return low, to


@register("random_.to")
class RandomTo(_Integers):
    """From 0."""

    def arguments(self, to: int) -> tuple[int, int]:
        """The bounds."""
        return 0, to


@register("random_")
class Random(_Integers):
    """All whole numbers of the dtype."""

    def arguments(self) -> tuple[None, None]:
        """No bounds."""
        return None, None
