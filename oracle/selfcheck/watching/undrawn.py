"""Random numbers that are the same for every element of a draw: a model with noise of its own can then be held against itself.

A sample's noise goes with its place in the batch, so that the results of a permuted batch are not the permuted results. Within `undrawn` each draw
gives one number, another at every draw (a loop that draws until something fits must end), and the noise of a sample is that of its neighbour.
Permutations and choices without replacement are left as they are: what depends on them is not judged.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN: Final = 0.6180339887498949  # its multiples are spread evenly over [0, 1)


class Undrawn(TorchDispatchMode):  # type: ignore[misc]
    """Within, a draw gives the same number for every element."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _DRAWS and isinstance(result, torch.Tensor):
            self._count += 1
            share = math.fmod(self._count * GOLDEN, 1.0)
            with torch.no_grad():
                result.copy_(_DRAWS[name](share, func._overloadname, args, kwargs or {}, result))
        return result


def _normal(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    given = [a for a in args if not isinstance(a, list | tuple)]
    mean, deviation = (given[0] if given else kwargs.get("mean", 0.0)), (given[1] if len(given) > 1 else kwargs.get("std", 1.0))
    return mean + deviation * _standard(share, "", (), {}, like)


def _normal_(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    return _normal(share, "", args[1:], kwargs, like)


def _standard(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, NormalDist().inv_cdf(min(max(share, 1e-6), 1.0 - 1e-6)))


def _uniform(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, share)


def _uniform_(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    low, high = (args[1] if len(args) > 1 else kwargs.get("from", 0.0)), (args[2] if len(args) > 2 else kwargs.get("to", 1.0))
    return torch.full_like(like, low + share * (high - low))


def _exponential_(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, -math.log(1.0 - share) / float(args[1] if len(args) > 1 else kwargs.get("lambd", 1.0)))


def _integers(share: float, overload: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    low, high = (args[0], args[1]) if "low" in overload else (0, args[0])
    return torch.full_like(like, low + int(share * (high - low)))


def _coin(share: float, _: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    chance = args[1] if len(args) > 1 and args[1] is not None else kwargs.get("p", args[0])
    return (torch.as_tensor(share, device=like.device) < chance).to(like.dtype).expand_as(like)


def _integers_like(share: float, overload: str, args: Any, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
    return _integers(share, overload, args[1:], kwargs, like)


_DRAWS: Final = {
    "normal": _normal, "normal_": _normal_, "randn": _standard, "randn_like": _standard, "rand": _uniform, "rand_like": _uniform, "uniform_": _uniform_,
    "exponential_": _exponential_, "randint": _integers, "randint_like": _integers_like, "bernoulli": _coin, "bernoulli_": _coin,
}  # fmt: skip
