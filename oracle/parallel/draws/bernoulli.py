"""`bernoulli_` with one probability: under `F.dropout`, an attention's dropout, an LSTM's, DropPath's mask."""

from __future__ import annotations

import numpy as np
import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("bernoulli_.float")
class Bernoulli(Elementwise):
    """1 where a word is below ⌊p·2³²⌋."""

    def arguments(self, p: float = 0.5) -> tuple[float]:
        """The probability of 1."""
        return (p,)

    def keyed(self, bits: Bits, dtype: torch.dtype, p: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        most = int(p * 2**32) - 1  # the largest word that gives 1
        return torch.from_numpy(bits.words()[:, 0] <= np.uint32(most)) if most >= 0 else torch.zeros(bits.count, dtype=torch.bool)

    def kernel(self, out: torch.Tensor, p: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.bernoulli_(p, generator=generator)
