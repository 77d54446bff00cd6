"""`uniform_`: under `torch.rand`, `rand_like`, `nn.init.uniform_`, `xavier_uniform_`, `kaiming_uniform_`."""

from __future__ import annotations

from typing import ClassVar

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("uniform_")
class Uniform(Elementwise):
    """low + u·(high − low), u of 24 bits (53 in float64)."""

    curand: ClassVar[tuple[str, str]] = ("uniform", "x == b ? a : x")  # of x·(b − a) + a, rounded: (0, 1] becomes [0, 1)

    def arguments(self, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
        """The bounds."""
        return low, high

    def keyed(self, bits: Bits, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        return bits.unit(dtype == torch.float64).mul_(high - low).add_(low)

    def kernel(self, out: torch.Tensor, low: float, high: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.uniform_(low, high, generator=generator)
