"""Whether a state that is kept for later is a copy.

A row of `Value.KEPT`, `snapshot`, when a program saves what `state_dict()` of a model gave it some updates ago, has asked for a newer one since, and what it saves holds the model's own memory: `state_dict()` copies nothing, so
that the best weights that were kept are the last ones by now. A state that is taken anew for each file, one that is taken once and saved again and again on purpose (nothing newer is asked for), and copies are none.
What is loaded in this way is told by `relations/roundtrip`. Cost: some Python at each `state_dict()`, and a look at what is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_TAKEN: Final = "torch.nn.Module.state_dict"
_SAVED: Final = "torch.save"
_UPDATE: Final = "torch.optim.Optimizer.step"
_KEPT: Final = 64  # states
_DEPTH: Final = 3
_ENTRIES: Final = 64


@register
class Snapshots(Probe):
    """States of models that a program keeps."""

    name = "snapshots"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._updates = 0
        self._states: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], int]] = {}  # the state, its model, and updates before it
        self._newest: dict[int, int] = {}  # by model: updates before the newest state

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == _UPDATE:
            return None, self._updated
        return {_TAKEN: (None, self._taken), _SAVED: (self._saves, None)}.get(function, NO_HOOKS)

    def thinned(self) -> None:
        """Updates that are left out are not counted; those that are, are."""

    def _updated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._updates += not raised

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if raised or len(args) > 1 or (kwargs or {}).get("destination") is not None:
            return
        try:
            state = weakref.ref(result)
        except TypeError:  # a plain dict
            return
        self._states = {key: known for key, known in self._states.items() if known[0]() is not None and known[1]() is not None}
        self._newest[id(args[0])] = self._updates
        if len(self._states) < _KEPT:
            self._states[id(result)] = state, weakref.ref(args[0]), self._updates

    def _saves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given: Any = args[0] if args else (kwargs or {}).get("obj")
        for state in _states(given, _DEPTH) if self._states else ():
            known = self._states.get(id(state))
            kept: Any = known[0]() if known is not None else None
            if known is None or kept is not state:
                continue
            model, then = known[1](), known[2]
            if model is None or then >= self._newest.get(id(model), 0):
                continue
            name = next((name for name, p in plainly.named_parameters(model) if _same(p, kept.get(name))), None)
            if name is not None:
                kind, ago = type(model).__name__, self._updates - then
                seen = f"the state of {kind} that is saved was taken {ago} update{'' if ago == 1 else 's'} ago and is no copy: it holds what {kind} is now, since state_dict() copies nothing"
                self.sink.number(name, float(ago), kind=Value.KEPT, facts={"what": "snapshot", "seen": seen})
                return


def _states(value: Any, depth: int) -> Iterator[Any]:
    """The mappings in what is saved, the outermost first."""
    if isinstance(value, Mapping):
        yield value
    if depth and isinstance(value, Mapping | list | tuple):
        for inner in list(value.values() if isinstance(value, Mapping) else value)[:_ENTRIES]:
            if isinstance(inner, Mapping | list | tuple):
                yield from _states(inner, depth - 1)


def _same(parameter: Any, kept: Any) -> bool:
    """Whether two tensors are one memory that is there."""
    import torch

    return isinstance(kept, torch.Tensor) and parameter.layout is torch.strided and parameter.device == kept.device and parameter.numel() > 0 and not parameter.is_meta and parameter.data_ptr() == kept.data_ptr() != 0
