"""Whether a scheduler is stepped at the wrong end of its loop.

A row of `Value.KEPT`, `early`, once for a scheduler: the line that stepped it before anything was trained steps it again behind the updates that follow. Each pass then trains with the rate of the next one, and the first rate
is never used. One that is told its epoch says itself which rate it means; one step before the training that is not in the loop moves a schedule to where it was (a warm-up, a run that goes on), and so do several.
Cost: some Python at each step of a scheduler, up to its second; nothing behind it.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._askers import Askers
from proctor.invariants.schema import Value

STEP: Final = "torch.optim.lr_scheduler.LRScheduler.step"
BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})
_MADE: Final = "torch.optim.lr_scheduler.LRScheduler.__init__"
_UPDATE: Final = "torch.optim.Optimizer.step"
_SCHEDULERS: Final = 16


class _Scheduler:
    """One that has not been spoken of."""

    def __init__(self, scheduler: Any) -> None:
        self.ref, self.optimizer = weakref.ref(scheduler), weakref.ref(scheduler.optimizer)
        self.line: tuple[str, int] | None = None  # that stepped it before the training
        self.updates = 0  # of its optimizer since then


@register
class Ahead(Probe):
    """Schedulers that step before their optimizers."""

    name = "ahead"
    kinds = frozenset({Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._askers = Askers()
        self._known: dict[int, _Scheduler] = {}
        self._trained = False

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in BACKWARDS:
            return self._trains, None
        return {_MADE: (None, self._made), STEP: (self._steps, None), _UPDATE: (self._updates, None)}.get(function, NO_HOOKS)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised and getattr(args[0], "optimizer", None) is not None and len(self._known) < _SCHEDULERS:
            self._known[id(args[0])] = _Scheduler(args[0])

    def _trains(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._trained = True
        self._known = {key: known for key, known in self._known.items() if known.line is not None} if self._known else {}

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        for known in self._known.values() if self._trained else ():
            known.updates += known.line is not None and known.optimizer() is args[0]

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known = self._known.get(id(args[0]))
        if known is None or known.ref() is not args[0]:
            return
        frame = self._askers.of(sys._getframe())
        line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
        told = len(args) > 1 or bool(kwargs)
        if not self._trained and known.line is None and not told and line is not None:
            known.line = line
            return
        if not self._trained:  # a second one before the training
            known.line = None
        del self._known[id(args[0])]
        early = known.line is not None and known.line == line and known.updates > 0 and not told
        if known.line is not None:
            name = type(args[0]).__name__
            seen = f"{name} steps at {os.path.basename(known.line[0])}:{known.line[1]} before the first update, and at that line again after {known.updates} update{'' if known.updates == 1 else 's'}: each pass trains with the rate of the next" if early else ""
            self.sink.number(name, float(early), kind=Value.KEPT, facts={"what": "early", "seen": seen})
