"""Whether a model is given what it is to say.

A row of `Value.KEPT`, `answer`, of a loss whose target of real numbers is, for the third batch in a row, the last entry of what the model was given along one of its dimensions: the last place of a sequence that
is to be continued, or a last column that is the label. A model that gives back all that it is given (an autoencoder) is none: there the target is no part of it, but all. Only the first steps are looked at, and
only tensors on the CPU. Cost: 10 µs a loss.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, EarlyProbe, Home, Hooks, Sink, register
from proctor.instrument.probes.judged import readable, tensors
from proctor.instrument.probes.source.formulas import is_loss_of_torch
from proctor.invariants.schema import MODEL_CALL, Value

_LEAST: Final = 3  # entries along the dimension
_TELLING: Final = 8  # elements of a target
_BATCHES: Final = 3
_TENSORS: Final = 4  # of what a model is given


@register
class Answers(EarlyProbe):
    """Targets that are a part of what the model is given."""

    name = "answers"
    kinds = frozenset({Value.KEPT})
    looks = 32

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._given: list[Any] = []
        self._times = 0

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._called, None
        if home is Home.TORCH and is_loss_of_torch(function):
            return self._lost, None
        return NO_HOOKS

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        self._given = []

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self.left > 0 and getattr(args[0], "training", False) and next(plainly.parameters(args[0]), None) is not None:
            given = list(tensors([*args[1:], *(kwargs or {}).values()]))[:_TENSORS]
            self._given = [*self._given, *(t for t in given if t.is_floating_point() and t.dim() > 1 and not t.requires_grad)][:_TENSORS]

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        result: Any = args[0] if args else (kwargs or {}).get("input")
        target: Any = args[1] if len(args) > 1 else (kwargs or {}).get("target")
        if self.left <= 0 or not self._given or not getattr(result, "requires_grad", False) or not readable(target) or not target.is_floating_point() or target.requires_grad:
            return
        self.left -= 1
        found = next((place for given in self._given if (place := last_entry(given, target)) is not None), None)
        self._given = []
        self._times = self._times + 1 if found is not None else 0
        if found is not None and self._times == _BATCHES:
            dim, size, shape = found
            seen = f"the target of the loss is a part of what the model is given: the last of the {size} entries along dimension {dim} of its input of shape {shape}"
            self.sink.number("target", float(dim), kind=Value.KEPT, facts={"what": "answer", "seen": seen})


def last_entry(given: Any, target: Any) -> tuple[int, int, tuple[int, ...]] | None:
    """The dimension of an input whose last entry is the target, that dimension's size, and the shape of the input."""
    import torch

    shape = tuple(given.shape)
    if target.numel() < _TELLING or given.numel() < _LEAST * target.numel() or target.dtype != given.dtype or target.shape[0] != shape[0]:
        return None
    with torch.no_grad():
        for dim in range(1, len(shape)):
            if shape[dim] < _LEAST or given.numel() != shape[dim] * target.numel():
                continue
            last = given.detach().select(dim, shape[dim] - 1)
            if _plain(last.shape) == _plain(target.shape) and bool((last.reshape(-1) == target.detach().reshape(-1)).all()):
                return (dim, shape[dim], shape) if bool((target != target.reshape(-1)[0]).any()) else None
    return None


def _plain(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size > 1]
