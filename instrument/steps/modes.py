"""Models that train in evaluation mode: by a mistake, with norms that are kept, or since a library loads them so.

A forward with gradients in evaluation mode is an evaluation without `no_grad`, or it is of an update. Two things tell:

* A backward adds to gradients of the model, and no other model with the same parameters trains in training mode. From then on its forwards are training, until it is called in
  training mode.
* Nothing but training was done at the place in the program that calls it, and the model was evaluated at another place since: somebody forgot to set it to train again.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType
from typing import Any, Final

import torch

from proctor.instrument.observe import plainly

KEPT: Final = 16  # models, and places of each
LOOKED_AT: Final = 8  # parameters of each, spread over it: a part may have no gradient

_Place = tuple[CodeType, int]
_Gradients = list[tuple[int, int] | None]


class _Model:
    """What is known of one.

    Attributes:
        trains: in evaluation mode.
        evaluated: was called so the last time, with gradients, and nothing tells yet.
        trained: was called in training mode the last time.
        elsewhere: was evaluated at another place since it trained.
        places: at which it was called in training mode, and whether nothing else was done there.
        guessed: the place of a call that was taken for training; no backward has told yet.
        parameters: that are looked at.
        before: their gradients at the begin of a backward.
    """

    __slots__ = ("before", "elsewhere", "evaluated", "guessed", "parameters", "places", "ref", "trained", "trains")

    def __init__(self, model: Any) -> None:
        self.ref = weakref.ref(model)
        self.trains = self.evaluated = self.trained = self.elsewhere = False
        self.places: dict[_Place, bool] = {}
        self.guessed: _Place | None = None
        self.parameters: list[weakref.ref[Any]] = []
        self.before: _Gradients | None = None


class TrainsInEval:
    """Which models of one process train in evaluation mode."""

    def __init__(self) -> None:
        self._models: dict[int, _Model] = {}

    def called(self, model: Any, grad: bool = True) -> bool:
        """An outermost model is called.

        Args:
            model: that is called.
            grad: with gradients.

        Returns:
            whether the call is training.
        """
        one = self._models.get(id(model))
        if one is None or one.ref() is not model:
            if not grad:
                return False
            if len(self._models) >= KEPT:
                self._models.pop(next(iter(tuple(self._models))), None)
            one = self._models[id(model)] = _Model(model)
        if model.training:
            if grad:
                self._trains(one)
            return grad
        if not grad:
            if not one.elsewhere:
                self._evaluates(one)
            return False
        if one.trains:
            return True
        if not one.evaluated:
            trained = [p for p in plainly.parameters(model) if plainly.trained(p)]
            one.parameters = [weakref.ref(p) for p in trained[:: max(1, len(trained) // LOOKED_AT)]]
            one.evaluated = True
        one.trained = False
        return self._evaluates(one)

    @staticmethod
    def _trains(one: _Model) -> None:
        """A call in training mode."""
        one.trains = one.evaluated = one.elsewhere = False
        one.trained = True
        if one.guessed is not None:
            one.places[one.guessed], one.guessed = False, None
        if (place := _place()) is not None and len(one.places) < KEPT:
            one.places.setdefault(place, True)

    @staticmethod
    def _evaluates(one: _Model) -> bool:
        """A call in evaluation mode; returns whether its place has trained alone."""
        place = _place()
        if place is None or place not in one.places:
            one.elsewhere = True
            return False
        if not one.elsewhere:
            one.places[place] = False
        if one.places[place]:
            one.guessed = place
        return one.places[place]

    def backward_begins(self) -> None:
        """Remember the gradients of what was evaluated."""
        for one in tuple(self._models.values()):  # another thread may call models
            one.before = _gradients(one.parameters) if one.evaluated else None

    def backward_ends(self) -> bool:
        """Look which of what was evaluated has other gradients now.

        Returns:
            whether a model is known to train that was not.
        """
        found = False
        for one in tuple(self._models.values()):
            before, one.before = one.before, None
            model = one.ref()
            if before is None or model is None or not one.evaluated or _gradients(one.parameters) == before:
                continue
            one.evaluated, one.guessed = False, None
            one.trains = not self._shared(model)
            found |= one.trains
        return found

    def _shared(self, model: Any) -> bool:
        """Whether another one with parameters of it trains in training mode."""
        trained = [other for one in tuple(self._models.values()) if one.trained and (other := one.ref()) is not None]
        others = {id(p) for other in trained for p in plainly.parameters(other)}
        return bool(others) and any(id(p) in others for p in plainly.parameters(model))


def _place() -> _Place | None:
    """Where the program, or a library of it, calls the model."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "proctor":
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code, frame.f_lasti)


def _gradients(parameters: list[weakref.ref[Any]]) -> _Gradients:
    """What tells that a gradient was written: the tensor and its version."""
    with torch._C.DisableTorchFunction():
        found = [p.grad for ref in parameters if (p := ref()) is not None]
        return [None if g is None else (id(g), -1 if g.is_inference() else g._version) for g in found]
