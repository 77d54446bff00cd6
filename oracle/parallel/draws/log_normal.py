"""`log_normal_`."""

from __future__ import annotations

import math

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("log_normal_")
class LogNormal(Elementwise):
    """exp(mean + std·z), by Python's scalar function: the same bits wherever an element lies."""

    def arguments(self, mean: float = 1.0, std: float = 2.0) -> tuple[float, float]:
        """Of the logarithm."""
        return mean, std

    def keyed(self, bits: Bits, dtype: torch.dtype, mean: float, std: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        z = bits.normal(dtype == torch.float64).double().numpy(force=True)
        return torch.tensor([math.exp(mean + std * v) for v in z.tolist()], dtype=torch.float64)

    def kernel(self, out: torch.Tensor, mean: float, std: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.log_normal_(mean, std, generator=generator)
