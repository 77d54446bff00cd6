"""`cauchy_`."""

from __future__ import annotations

import math

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("cauchy_")
class Cauchy(Elementwise):
    """median + sigma·tan(π·(u − ½)), by numpy's scalar function: the same bits wherever an element lies."""

    def arguments(self, median: float = 0.0, sigma: float = 1.0) -> tuple[float, float]:
        """Median and scale."""
        return median, sigma

    def keyed(self, bits: Bits, dtype: torch.dtype, median: float, sigma: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        unit = bits.unit(dtype == torch.float64).double().numpy(force=True)
        return torch.tensor([median + sigma * math.tan(math.pi * (u - 0.5)) for u in unit.tolist()], dtype=torch.float64)

    def kernel(self, out: torch.Tensor, median: float, sigma: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.cauchy_(median, sigma, generator=generator)
