"""`bernoulli_` with one probability: under `F.dropout`, an attention's dropout, an LSTM's, DropPath's mask."""

from __future__ import annotations

from typing import ClassVar

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("bernoulli_.float")
class Bernoulli(Elementwise):
    """1 where a word is below ⌊p·2³²⌋."""

    curand: ClassVar[tuple[str, str]] = ("uniform", "(TYPE)(float)(number < arguments[0])")

    def arguments(self, p: float = 0.5) -> tuple[float]:
        """The probability of 1."""
        return (p,)

    def keyed(self, bits: Bits, dtype: torch.dtype, p: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        return bits.below(p)

    def kernel(self, out: torch.Tensor, p: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.bernoulli_(p, generator=generator)
