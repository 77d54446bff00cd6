"""`bernoulli_` with a tensor of probabilities, and `torch.bernoulli(p)`."""

from __future__ import annotations

import torch

from proctor.oracle.parallel.draws import Draw, Elementwise, Place, register, rule
from proctor.oracle.parallel.streams.keyed import Bits


@register("bernoulli_.Tensor")
class BernoulliOf(Elementwise):
    """1 where a uniform number is below the element's own probability; probabilities lie as the result does."""

    def keyed(self, bits: Bits, dtype: torch.dtype, p: torch.Tensor) -> torch.Tensor:
        """See `Elementwise.keyed`."""
        double = p.dtype == torch.float64
        return bits.unit(double) < (p if double else p.float())

    def kernel(self, out: torch.Tensor, p: torch.Tensor, *, generator: torch.Generator) -> None:
        """See `Elementwise.kernel`."""
        out.bernoulli_(p, generator=generator)

    def variety(self, p: torch.Tensor) -> str:
        """See `Elementwise.variety`."""
        return str(p.dtype)


@register("bernoulli.out")
class BernoulliInto(Draw):
    """`torch.bernoulli(p)`: the result is overwritten by `bernoulli_.Tensor`, as torch does."""

    def __call__(self, place: Place, p: torch.Tensor, *, generator: object = None, out: torch.Tensor) -> torch.Tensor:
        """See `Draw`."""
        result: torch.Tensor = rule("bernoulli_.Tensor")(place, out.resize_(p.shape), p)
        return result
