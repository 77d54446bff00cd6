"""`exponential_`: under `gumbel_softmax` and sampling by races."""

from __future__ import annotations

import torch

from proctor.oracle.parallel.draws import Elementwise, register
from proctor.oracle.parallel.streams.keyed import Bits


@register("exponential_")
class Exponential(Elementwise):
    """−log(1 − u)/λ."""

    def arguments(self, lambd: float = 1.0) -> tuple[float]:
        """The rate."""
        return (lambd,)

    def keyed(self, bits: Bits, dtype: torch.dtype, lambd: float) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        return bits.log_unit(dtype == torch.float64).div_(lambd)

    def kernel(self, out: torch.Tensor, lambd: float, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.exponential_(lambd, generator=generator)
