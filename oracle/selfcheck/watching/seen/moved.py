"""Which parameters have had a gradient, and which the program moves by itself: a target, or an average, that an optimizer holds beside what it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


class Moved:
    """What is seen of parameters when an optimizer steps.

    Attributes:
        graded: by id, whether any update so far had a gradient that is not zero.
        by_hand: by id of a parameter that never had a gradient at all, whether it is another than in an update before. No optimizer moves such a one.
    """

    def __init__(self) -> None:
        self.graded: dict[int, bool] = {}
        self.by_hand: dict[int, bool] = {}
        self._sums: dict[int, tuple[float, float]] = {}

    def look(self, parameter: Any) -> None:
        """Take a parameter of an optimizer that is about to step."""
        key, grad = id(parameter), getattr(parameter, "grad", None)
        if grad is not None:
            self.by_hand[key] = False
            if not self.graded.get(key, False):
                self.graded[key] = bool((grad.coalesce().values() if grad.is_sparse else grad).any())
        elif type(parameter) in (torch.Tensor, nn.Parameter) and parameter.layout is torch.strided and parameter.device.type != "meta" and key not in self.graded and not self.by_hand.get(key, False):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                numbers = parameter.detach().abs().double()
                now = (float(parameter.detach().real.double().sum()), float(numbers.square().sum()))
            before = self._sums.setdefault(key, now)
            self.by_hand[key] = before != now and all(n == n for n in now)
