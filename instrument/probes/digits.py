"""Whose digits the numbers have that layers are given and give: a float32 that went through bfloat16 or float16 has lost the last ones.

Rows of `Value.DIGITS`: of what was computed from parameters, a sample of numbers is looked at; meta `digits` is the type that all of them fit into, and the
number says how many of them tell it: those whose last digit in that type is set. Whole numbers, pixels and other multiples of one unit fit into a half type,
too, and are told by lying at one exponent. Only the first steps are looked at, and only tensors on the CPU. Cost: 25 µs a look, 0.5 µs a call afterwards.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, register
from proctor.invariants.schema import Value

_GIVES: Final = frozenset(f"torch.nn.functional.{name}" for name in ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d")) | {"torch.conv1d", "torch.conv2d", "torch.conv3d"}
_TAKES: Final = frozenset(
    f"{home}.{name}" for home in ("torch.nn.functional", "torch")
    for name in """relu gelu silu elu leaky_relu tanh sigmoid softmax log_softmax layer_norm batch_norm group_norm dropout max_pool2d avg_pool2d
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div""".split()
)  # fmt: skip
_SAMPLE: Final = 256
_EXPONENTS: Final = 3  # at which the last digits are set; multiples of one unit have them at one
# Name, digits of float32 behind its own, bits of a number that are its exponent.
_HALVES: Final = (("bfloat16", 16), ("float16", 13))


@register
class Digits(EarlyProbe):
    """Rows of `Value.DIGITS`."""

    name = "digits"
    kinds = frozenset({Value.DIGITS})
    looks = 200

    def hooks(self, function: str, home: Home) -> Hooks:
        if home is not Home.TORCH or (function not in _GIVES and function not in _TAKES):
            return NO_HOOKS
        return self._taken, (self._given if function in _GIVES else None)

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left > 0 and args:
            self._look("given", args[0])

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if self.left > 0 and not raised:
            self._look("result", result)

    def _look(self, place: str, value: Any) -> None:
        import torch

        from proctor.instrument.observe.content import array_of, readable

        if type(value) is not torch.Tensor or value.dtype is not torch.float32 or value.device.type != "cpu" or not value.requires_grad:
            return
        if not value.numel() or readable(value) is None:
            return
        self.left -= 1
        digits, telling = digits_of(array_of(value.detach().reshape(-1)[:_SAMPLE]))
        self.sink.number(place, float(telling), kind=Value.DIGITS, facts={"digits": digits})


def digits_of(sample: np.ndarray[Any, Any]) -> tuple[str, int]:
    """The least type that holds all of these float32, and how many of them tell it."""
    raw = np.ascontiguousarray(sample).view(np.uint32)
    for name, lost in _HALVES:
        if (raw & np.uint32((1 << lost) - 1)).any():
            continue
        last = raw[(raw >> np.uint32(lost)) & np.uint32(1) == 1]
        if len(np.unique((last >> np.uint32(23)) & np.uint32(0xFF))) >= _EXPONENTS:
            return name, len(last)
        return "unknown", 0
    return "float32", len(raw)
