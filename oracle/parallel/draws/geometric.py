"""`geometric_`: trials until the first success."""

from __future__ import annotations

import math

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("geometric_")
class Geometric(Elementwise):
    """⌈log(1 − u)/log(1 − p)⌉, at least 1."""

    def keyed(self, bits: Bits, dtype: torch.dtype, p: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        return bits.log_unit(dtype == torch.float64).div_(-math.log1p(-p)).ceil_().clamp_(min=1)

    def kernel(self, out: torch.Tensor, p: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.geometric_(p, generator=generator)
