"""Whether a new optimizer begins at its beginning: a dummy update, which makes room for a state to be loaded, counts if no state follows.

A row of `Value.KEPT` at the second update of each optimizer: it has seen one before, with gradients that were all zero and no backward since it was built, and no
`load_state_dict` since. Its bias corrections are then those of a later step. Cost: one look at the gradients of an optimizer, at its first update.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_MADE: Final = "torch.optim.Optimizer.__init__"
_LOADED: Final = "torch.optim.Optimizer.load_state_dict"
_BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})
_OPTIMIZERS: Final = 64


class _Known:
    """An optimizer that has made no second update yet."""

    def __init__(self, optimizer: Any, backwards: int) -> None:
        self.ref = weakref.ref(optimizer)
        self.backwards = backwards  # when it was built
        self.updates = 0
        self.dummy = False


@register
class Advances(Probe):
    """Dummy updates."""

    name = "advances"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._backwards = 0
        self._known: dict[int, _Known] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _BACKWARDS:
            return self._backward, None
        return {_MADE: (None, self._made), _UPDATE: (self._updates, None), _LOADED: (self._loads, None)}.get(function, NO_HOOKS)

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._backwards += 1

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised and len(self._known) < _OPTIMIZERS:
            self._known[id(args[0])] = _Known(args[0], self._backwards)

    def _of(self, optimizer: Any) -> _Known | None:
        known = self._known.get(id(optimizer))
        return known if known is not None and known.ref() is optimizer else None

    def _loads(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known = self._of(args[0])
        if known is not None:
            known.dummy = False

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known = self._of(args[0])
        if known is None:
            return
        known.updates += 1
        if known.updates == 1:
            known.dummy = not args[0].state and self._backwards == known.backwards and self._nothing(args[0])
            return
        del self._known[id(args[0])]
        counts = [count for state in args[0].state.values() if (count := _count(state)) is not None]
        if self._backwards == known.backwards or not counts:
            return
        seen = f"the state of {type(args[0]).__name__} counts {max(counts):.0f} update, whose gradients were all zero, before any backward; no load_state_dict took it back" if known.dummy else ""
        self.sink.number("step", max(counts), kind=Value.KEPT, facts={"what": "beginning", "seen": seen})

    def _nothing(self, optimizer: Any) -> bool:
        """Whether an optimizer has gradients, and all are zero."""
        import torch

        read = self.sink.gradients(p for group in optimizer.param_groups for p in group["params"])
        grads = [grad for grad in read or () if grad is not None]
        # What is spread over ranks is not asked: it would talk to them.
        plain = all(type(grad) is torch.Tensor for grad in grads)
        return plain and bool(grads) and not any(bool((grad.detach() != 0).any()) for grad in grads)


def _count(state: Any) -> float | None:
    count: Any = state.get("step") if isinstance(state, dict) else None
    if isinstance(count, int | float):
        return float(count)
    return float(count) if getattr(getattr(count, "device", None), "type", "") == "cpu" and count.numel() == 1 else None
