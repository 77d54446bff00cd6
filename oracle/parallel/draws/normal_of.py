"""`torch.normal` whose mean or deviation is a tensor: a standard normal draw, scaled and moved as torch does."""

from __future__ import annotations

from typing import Any

import torch

from proctor.oracle.parallel.draws import Draw, Place, register, rule


@register("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
class NormalOf(Draw):
    """mean and std lie as the result does; where both are tensors they are of one shape."""

    def __call__(self, place: Place, mean: Any, std: Any = 1.0, *, generator: Any = None) -> torch.Tensor:
        """See `Draw`."""
        like = mean if isinstance(mean, torch.Tensor) else std
        both = isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor)
        out = torch.empty(torch.broadcast_shapes(mean.shape, std.shape) if both else like.shape, dtype=like.dtype)
        if isinstance(std, torch.Tensor):
            return rule("normal_")(place, out, 0.0, 1.0).mul_(std).add_(mean)
        return rule("normal_")(place, out, 0.0, std).add_(mean)
