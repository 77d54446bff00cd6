"""Where results of a model meet what they are compared with: N numbers and N numbers that become N × N, since one of them has an axis of one more.

`values - targets` with shapes (64, 1) and (64,) is not 64 differences but 4,096: torch broadcasts, and the loss then takes every target for every sample. Losses of
torch are seen wherever they are called, differences and products outside of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional as F

from proctor.oracle.selfcheck.watching.parting import program_line

if TYPE_CHECKING:
    from proctor.instrument.patch.replaced import Replaced

METHODS: Final = ("__sub__", "__rsub__", "sub", "__mul__", "__rmul__", "mul")
LOSSES: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "kl_div", "gaussian_nll_loss")


@dataclass(frozen=True)
class Crossed:
    """Two tensors of as many numbers that became one of their square.

    Attributes:
        op: of torch.
        one, other: shapes; the first is the result's.
        line: `file:line` of the program.
    """

    op: str
    one: tuple[int, ...]
    other: tuple[int, ...]
    line: str


class Pairs:
    """Watches for them.

    Args:
        guard: keeps errors of ours from the program.
        within: the outermost module that runs, if any.
    """

    def __init__(self, guard: Callable[[Callable[..., None]], Callable[..., None]], within: Callable[[], Any]) -> None:
        self.crossed: list[Crossed] = []
        self.met = 0
        self._within, self._see = within, guard(self._seen)
        self._inside = False

    def install(self, attached: Replaced) -> None:
        """Wrap losses, differences and products."""
        for name in LOSSES:
            if hasattr(F, name):
                attached.wrap(F, name, self._around(name, True))
        for name in METHODS:
            attached.wrap(torch.Tensor, name, self._around(name.strip("_"), False))
        for name in ("sub", "mul"):
            attached.wrap(torch, name, self._around(name, False))

    def begin(self) -> None:
        """Another update begins."""
        self.crossed, self.met = [], 0

    def _around(self, name: str, loss: bool) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            self._inside = True
            try:
                self._see(name, loss, args, kwargs)
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return around

    def _seen(self, name: str, loss: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        one = args[0] if args else kwargs.get("input")
        other = args[1] if len(args) > 1 else kwargs.get("target", kwargs.get("other"))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.requires_grad == other.requires_grad or not one.ndim or not other.ndim:
            return
        self.met += 1
        if one.ndim == other.ndim or one.numel() != other.numel() or one.numel() < 2 or [n for n in one.shape if n != 1] != [n for n in other.shape if n != 1]:
            return
        made = torch.broadcast_shapes(one.shape, other.shape).numel()
        result, target = (one, other) if one.requires_grad else (other, one)
        if made <= one.numel() or isinstance(result, torch.nn.Parameter) or bool((target == target.reshape(-1)[0]).all()):
            return  # a constant target is the same for every sample
        if not loss and (_widened(result) or _widened(target) or _trains(self._within())):
            return
        self.crossed.append(Crossed(name, tuple(result.shape), tuple(target.shape), program_line()))


def _widened(tensor: torch.Tensor) -> bool:
    """Whether an axis was put in just now (`x[:, None]`): then every pair is what its author asked for."""
    made_by = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    base = tensor._base if tensor._is_view() else None
    return made_by.startswith("Unsqueeze") or (base is not None and base.ndim < tensor.ndim)


def _trains(module: Any) -> bool:
    return isinstance(module, torch.nn.Module) and any(p.requires_grad for p in module.parameters())
