"""What norm clipping found: rows of `Value.CLIPPED`, one a call of `clip_grad_norm_`; the number is the norm that it returned.

Only a norm that lies on the CPU is read: elsewhere that would wait for the device. Cost: 2 µs a clipping.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, register
from proctor.invariants.schema import Value

_CLIP: Final = "torch.nn.utils.clip_grad_norm_"


@register
class Clipping(Probe):
    """Norms that were found by clipping."""

    name = "clipping"
    kinds = frozenset({Value.CLIPPED})

    def hooks(self, function: str, home: Home) -> Hooks:
        return (None, self._clipped) if home is Home.TORCH and function == _CLIP else NO_HOOKS

    def _clipped(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised and getattr(getattr(result, "device", None), "type", "") == "cpu" and result.numel() == 1 and type(result).__name__ == "Tensor":
            self.sink.number("norm", float(result.detach()), kind=Value.CLIPPED)
