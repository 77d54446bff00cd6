"""`native_dropout`: the fused dropout that a program calls by name; `F.dropout` on a CPU ends in `bernoulli_`."""

from __future__ import annotations

import torch

from proctor.oracle.parallel.draws import Draw, Place, register, rule


@register("native_dropout")
class NativeDropout(Draw):
    """The input times a mask of bernoulli(1 − p), scaled by 1/(1 − p); a mask of ones in evaluation."""

    def __call__(self, place: Place, input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Draw`."""
        if train is False:
            return input.clone(), torch.ones_like(input, dtype=torch.bool)
        mask = rule("bernoulli_.float")(place, torch.empty(input.shape, dtype=torch.bool, device=input.device), 1.0 - p)
        return input.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask
