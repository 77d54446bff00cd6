"""What functions return inside a checkpointed function, in its first pass and when it is computed again for the gradient.

Rows of `Value.FIRST` and `Value.AGAIN`; the place is the function, and the fingerprint that of the first elements of what it
returned. Looked at are random functions, layers and attention, on the CPU. Cost: 10 µs a call of them inside a checkpointed
function, at most `_MAX_A_STEP` a step, and a fraction of a microsecond outside.

A second pass is told by the frames that lead to the call: within a backward, from the module that defines `checkpoint`.
Nothing private of torch is named or wrapped.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

CHECKPOINT: Final = "torch.utils.checkpoint.checkpoint"
_MODULE: Final = "torch.utils.checkpoint"
_BACKWARD: Final = ("torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad")
_LOOKED_AT: Final = frozenset(
    [
        f"torch.nn.functional.{name}"
        for name in (
            "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "gumbel_softmax", "rrelu",
            "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "multi_head_attention_forward",
        )
    ]
    + [f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "normal", "multinomial")]
)  # fmt: skip
_MAX_A_STEP: Final = 512  # rows, of either kind
_ELEMENTS: Final = 4096  # of a result that are read
_DEPTH: Final = 64  # frames that are looked at


@register
class Recomputation(Probe):
    """First and second passes of checkpointed functions."""

    name = "recomputation"
    kinds = frozenset({Value.FIRST, Value.AGAIN})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._within = 0  # calls of `checkpoint` that have not returned
        self._backwards = 0
        self._used = False  # this process checkpoints
        self._left = {Value.FIRST: _MAX_A_STEP, Value.AGAIN: _MAX_A_STEP}

    def hooks(self, function: str, home: Home) -> Hooks:
        if home is not Home.TORCH:
            return NO_HOOKS
        if function == CHECKPOINT:
            return self._enters, self._leaves
        if function in _BACKWARD:
            return self._backward_begins, self._backward_ends
        if function not in _LOOKED_AT:
            return NO_HOOKS

        def after(args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
            if self._used and (self._within or self._backwards) and not raised:
                self._returned(function, result)

        return None, after

    def step_begins(self, step: int) -> None:
        self._left = {Value.FIRST: _MAX_A_STEP, Value.AGAIN: _MAX_A_STEP}
        self._within = self._backwards = 0  # whatever an exception or a step that was not sampled has left

    def _enters(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._within += 1
        self._used = True

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._within = max(self._within - 1, 0)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._backwards += 1

    def _backward_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._backwards = max(self._backwards - 1, 0)

    def _returned(self, function: str, result: Any) -> None:
        if self._backwards and _again(sys._getframe()):
            kind = Value.AGAIN
        elif self._within:
            kind = Value.FIRST
        else:
            return
        tensor = result[0] if isinstance(result, tuple) and result else result
        if self._left[kind] <= 0 or not _readable(tensor):
            return
        self._left[kind] -= 1
        self.sink.tensors(kind, [(function, -1, _head(tensor))])


def _again(frame: Any) -> bool:
    """Whether the module that checkpoints is on the way from a backward to here."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        frame = frame.f_back
    return False


def _readable(tensor: Any) -> bool:
    return hasattr(tensor, "data_ptr") and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 1


def _head(tensor: Any) -> Any:
    import torch

    with torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().view(-1)
        return flat[:_ELEMENTS]
