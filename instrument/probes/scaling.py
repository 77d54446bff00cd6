"""Whether gradients are clipped as they are, and not while a loss scaler's factor is in them; and whether a checkpointed function passes gradients on.

Rows of `Value.KEPT`. `scaled`: at each `GradScaler.step` of an optimizer whose gradients were clipped since the loss was scaled: they were unscaled before. `cut`: a function that
is checkpointed, and has parameters that train, gives something that they get gradients through. A reentrant checkpoint all of whose inputs are without gradients gives none.
`rescaled`: an optimizer is stepped by the scaler that has stepped it before, unless that one still exists, or the new one was given a state.

Cost: some Python at each call of these functions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.plainly import inside
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_SCALER: Final = "torch.amp.GradScaler."
_CLIPS: Final = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
_CHECKPOINT: Final = "torch.utils.checkpoint.checkpoint"
_ROWS: Final = 16  # of each kind


@register
class Scaling(Probe):
    """Clipping behind a loss scaler, scalers that are made anew, and checkpoints that end gradients."""

    name = "scaling"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._scaled = False
        self._unscaled: set[int] = set()  # ids of optimizers
        self._clipped: dict[int, bool] = {}  # ids of parameters whose gradients were clipped, and whether some optimizer's had been unscaled
        self._cuts = self._steps = self._changes = _ROWS
        self._scalers: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}  # id of an optimizer → it, and who stepped it last
        self._given: weakref.WeakSet[Any] = weakref.WeakSet()  # scalers with a loaded state

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in _CLIPS:
            return self._clips, None
        if function == _CHECKPOINT:
            return None, self._checkpoints
        scaler = {"scale": (self._scales, None), "unscale_": (self._unscales, None), "step": (self._updates, None), "update": (self._over, None), "load_state_dict": (self._loads, None)}
        return scaler.get(function.removeprefix(_SCALER), NO_HOOKS) if function.startswith(_SCALER) else NO_HOOKS

    def _scales(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self._scaled:
            self._over(args, kwargs)
        self._scaled = bool(args[0].is_enabled())

    def _unscales(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if len(args) > 1:
            self._unscaled.add(id(args[1]))

    def _over(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._scaled = False
        self._unscaled.clear()
        self._clipped.clear()

    def _clips(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given = args[0] if args else (kwargs or {}).get("parameters")
        if not self._scaled or not isinstance(given, list | tuple):  # a generator can be read once, and not by us
            self._clipped.update({0: bool(self._unscaled)} if self._scaled else {})
            return
        self._clipped.update({id(p): bool(self._unscaled) for p in given})

    def _loads(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._given.add(args[0])

    def _stepped_by(self, scaler: Any, optimizer: Any) -> None:
        held, before = self._scalers.get(id(optimizer), (None, None))
        name = type(optimizer).__name__
        if held is None or before is None or held() is not optimizer:
            self._scalers[id(optimizer)] = weakref.ref(optimizer), weakref.ref(scaler)
            self.sink.number(name, 1.0, kind=Value.KEPT, facts={"what": "rescaled", "seen": ""})
        elif before() is not scaler:
            anew = before() is None and scaler not in self._given
            self._scalers[id(optimizer)] = held, weakref.ref(scaler)
            if anew and self._changes > 0:
                self._changes -= 1
                self.sink.number(name, 1.0, kind=Value.KEPT, facts={"what": "rescaled", "seen": f"{name} is stepped by a new scaler, which has to find its scale again and skips updates for that; the one before is gone"})

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self._scaled or len(args) < 2:
            return
        optimizer = args[1]
        self._stepped_by(args[0], optimizer)
        if not self._clipped or self._steps <= 0:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [before for key, before in self._clipped.items() if key == 0 or key in held]
        if mine:
            self._steps -= 1
            wrong = not any(mine) and id(optimizer) not in self._unscaled
            seen = f"the gradients of {type(optimizer).__name__} were clipped with the factor of the loss scaler in them; no unscale_ came before" if wrong else ""
            self.sink.number(type(optimizer).__name__, 1.0, kind=Value.KEPT, facts={"what": "scaled", "seen": seen})

    def _checkpoints(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        import torch

        if raised or self._cuts <= 0 or not args or not torch.is_grad_enabled():
            return
        given = [t for t in _floating(result, 2)]
        module = next((m for m in _modules(args[0]) if any(p.requires_grad for p in plainly.parameters(m))), None)
        if not given or module is None:
            return
        self._cuts -= 1
        name = type(module).__name__
        trained = next(n for n, p in plainly.named_parameters(module) if p.requires_grad)
        seen = "" if any(t.requires_grad for t in given) else f"{name} is checkpointed and gives a result without gradients, so that its parameters, such as {trained}, do not train"
        self.sink.number(f"{name}.{trained}", 1.0, kind=Value.KEPT, facts={"what": "cut", "seen": seen})


def _floating(value: Any, depth: int) -> Iterator[Any]:
    import torch

    if issubclass(type(value), torch.Tensor):
        if value.is_floating_point():
            yield value
    elif depth:
        for item in (inside(value) or ())[:16]:
            yield from _floating(item, depth - 1)


def _modules(function: Any) -> Iterator[Any]:
    """Modules that a function calls: itself, what it is a method of, what it is made of, what it closes over."""
    from torch.nn import Module

    if isinstance(function, functools.partial):
        yield from _modules(function.func)
        yield from (m for m in function.args if isinstance(m, Module))
        return
    if isinstance(function, Module):
        yield function
    if isinstance(getattr(function, "__self__", None), Module):
        yield function.__self__
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not yet filled
            continue
        if isinstance(content, Module):
            yield content
