"""Which parameters have had a gradient, which the program moves by itself (a target, or an average, that an optimizer holds beside what it trains), and of which it takes the gradient away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


class Moved:
    """What is seen of parameters when an optimizer steps.

    Attributes:
        graded: by id, whether any update so far had a gradient that is not zero.
        by_hand: by id of a parameter that never had a gradient at all, whether it is another than in an update before. No optimizer moves such a one.
        taken: by id of a parameter, whether the backward before an update gave it a gradient that is not there when the optimizer steps.
    """

    def __init__(self) -> None:
        self.graded: dict[int, bool] = {}
        self.by_hand: dict[int, bool] = {}
        self.taken: dict[int, bool] = {}
        self._given: set[int] = set()
        self._sums: dict[int, tuple[float, float]] = {}

    def gave(self, optimizers: Iterable[Any]) -> None:
        """A backward has ended: note what gradients it leaves, of parameters for which no update has had one yet."""
        held = (p for o in optimizers for group in o.param_groups for p in group["params"])
        # One of a parameter in parts over ranks is not looked at: the others need not be here.
        self._given = {id(p) for p in held if not self.graded.get(id(p), False) and type(p.grad) is torch.Tensor and _graded(p)}

    def look(self, parameter: Any) -> None:
        """Take a parameter of an optimizer that is about to step."""
        key, grad = id(parameter), getattr(parameter, "grad", None)
        if grad is not None:
            self.by_hand[key] = False
            if not self.graded.get(key, False):
                self.graded[key] = _graded(parameter)
        elif type(parameter) in (torch.Tensor, nn.Parameter) and parameter.layout is torch.strided and parameter.device.type != "meta" and key not in self.graded and not self.by_hand.get(key, False):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                numbers = parameter.detach().abs().double()
                now = (float(parameter.detach().real.double().sum()), float(numbers.square().sum()))
            before = self._sums.setdefault(key, now)
            self.by_hand[key] = before != now and all(n == n for n in now)
        if key in self._given and not self.graded.get(key, False):
            self.taken[key] = True


def _graded(parameter: Any) -> bool:
    """Whether its gradient is there and not zero."""
    grad = getattr(parameter, "grad", None)
    return grad is not None and bool((grad.coalesce().values() if grad.is_sparse else grad).any())
