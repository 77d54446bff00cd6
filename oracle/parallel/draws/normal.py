"""`normal_`: under `torch.randn`, `randn_like`, `nn.init.normal_`, `kaiming_normal_`, `orthogonal_`."""

from __future__ import annotations

from typing import ClassVar

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("normal_")
class Normal(Elementwise):
    """mean + std·z, z by Box and Muller from two words of the element."""

    blocks: ClassVar[bool] = True
    curand: ClassVar[tuple[str, str]] = ("normal", "x")

    def arguments(self, mean: float = 0.0, std: float = 1.0) -> tuple[float, float]:
        """Mean and deviation."""
        return mean, std

    def keyed(self, bits: Bits, dtype: torch.dtype, mean: float, std: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        return bits.normal(dtype == torch.float64).mul_(std).add_(mean)

    def kernel(self, out: torch.Tensor, mean: float, std: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.normal_(mean, std, generator=generator)
