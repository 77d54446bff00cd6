"""Whether a state that the program fills with other values is loaded.

A row of `Value.KEPT`, `filled`, at the first update: what `state_dict()` of a model gave before the training has other tensors in it by now, of the same shapes and with other values, the model is given nothing, by nobody, and trains. The values of
a file, or of another model, that are put into a state change a table and no model, until it is loaded. Tensors whose elements are all alike are made room for (sums, counts); copies of what the model holds change nothing.
A state that a function of its own fills, and that is gone when it returns, is not seen. Cost: a look at such a state, once.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_TAKEN: Final = "torch.nn.Module.state_dict"
_LOADED: Final = "torch.nn.Module.load_state_dict"
_UPDATE: Final = "torch.optim.Optimizer.step"
_STATES: Final = 16
_PARAMETERS: Final = 4096


@register
class Filled(Probe):
    """States that are filled, and not loaded."""

    name = "filled"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._states: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []  # a state and its model

    def hooks(self, function: str, home: Home) -> Hooks:
        return {_TAKEN: (None, self._taken), _LOADED: (self._loading, None), _UPDATE: (self._updates, None)}.get(function, NO_HOOKS)

    def thinned(self) -> None:
        self.over, self._states = True, []

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not (raised or self.over) and len(args) == 1 and not kwargs and type(result) is OrderedDict and len(self._states) < _STATES:
            self._states.append((weakref.ref(result), weakref.ref(args[0])))

    def _loading(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """What is given, and what it is given to, are no more spoken of."""
        given: Any = args[1] if len(args) > 1 else (kwargs or {}).get("state_dict")
        self._states = [(state, model) for state, model in self._states if state() is not given and model() is not args[0]]

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        states, self._states, was_over, self.over = self._states, [], self.over, True
        held = {id(p) for group in args[0].param_groups for p in group["params"]} if states and not was_over else set()
        for ref, of in states if held else ():
            state, model = ref(), of()
            if state is None or model is None:
                continue
            named = [(name, p) for name, p in list(plainly.named_parameters(model))[:_PARAMETERS] if id(p) in held]
            others = [name for name, p in named if name in state and _another(state[name], p)]
            if others:
                kind = type(model).__name__
                seen = f"the program has put other values into a state of {kind}, such as {others[0]} ({len(others)} of {len(named)} parameters), and has not loaded it: state_dict() gives a table, and {kind} trains from what it was before"
                self.sink.number(others[0], float(len(others)), kind=Value.KEPT, facts={"what": "filled", "seen": seen})
                return


def _another(kept: Any, parameter: Any) -> bool:
    """Whether an entry of a state is another tensor than the parameter, of its shape, with other values."""
    import torch

    from proctor.instrument.observe.content import unseen

    if type(kept) not in (torch.Tensor, torch.nn.Parameter) or kept.shape != parameter.shape or kept.layout is not torch.strided or kept.device.type != "cpu" or parameter.device.type != "cpu":
        return False
    if type(parameter) is not torch.nn.Parameter or kept.is_meta or kept.numel() < 2 or kept.dtype != parameter.dtype or kept.data_ptr() == parameter.data_ptr():
        return False
    with unseen():
        ours = kept.detach()
        return not bool((ours == parameter.detach()).all()) and not bool((ours == ours.reshape(-1)[0]).all())
