"""Whether a program leaves to DeepSpeed's engine what the engine does.

Rows of `Value.USAGE`, library `deepspeed`. `fed`: each `step` of an engine comes behind a backward pass. `counts`: an engine that accumulates over several batches is asked to step behind each of them, as it counts them itself; who
steps only behind as many as it accumulates over, updates as many times too seldom. `clears`: nobody clears gradients between the batches of one update. `updates`: nobody steps the engine's optimizer himself. `scheduled`: nobody steps the scheduler that the engine
steps. `clipped`: nobody clips gradients that the engine has taken out of the parameters (they are none there; `gradient_clipping` of its configuration clips).

Public methods of the engine alone are asked; of a pipeline's engine nothing is said. Cost: some Python at each of these calls.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Sink, register
from proctor.instrument.probes._usage import BACKWARDS, UPDATE, Usage

_ENGINE: Final = "deepspeed.DeepSpeedEngine."
_CLEARS: Final = frozenset({"torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad", f"{_ENGINE}zero_grad"})
_SCHEDULE: Final = "torch.optim.lr_scheduler.LRScheduler.step"
_CLIPS: Final = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
_AGAIN: Final = 2  # steps in a row
_MOST: Final = 4  # engines


class _Engine:
    """What happened to one engine since its last step."""

    def __init__(self, engine: Any) -> None:
        self.ref = weakref.ref(engine)
        self.params = {id(p) for p in plainly.parameters(engine.module)}
        self.forwards = self.backwards = 0
        self.pending = 0  # backwards since the last update
        self.gathered = 0  # steps in a row that were asked for behind all batches of an update


@register
class Engines(Usage):
    """Engines of DeepSpeed."""

    name = "engines"
    library = "deepspeed"

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: list[_Engine] = []
        self._within = 0  # calls of engines that run
        self._depth = 0  # of backward passes

    def hooks(self, function: str, home: Home) -> Hooks:
        if function.startswith(_ENGINE):
            method = function.removeprefix(_ENGINE)
            if method == "zero_grad":
                return self._clears, None
            return {"forward": (self._forward, None), "backward": (self._begins, self._ends), "step": (self._steps, self._stepped), "save_checkpoint": (self._begins, self._ends), "load_checkpoint": (self._begins, self._ends)}.get(method, NO_HOOKS)
        if function in BACKWARDS:
            return self._propagates, self._propagated
        if function in _CLEARS:
            return self._clears, None
        if function in _CLIPS:
            return self._clips, None
        if function == UPDATE:
            return self._updates, None
        if function == _SCHEDULE or (function.startswith("deepspeed.") and function.endswith(".step")):
            return self._schedules, None
        return NO_HOOKS

    def _of(self, engine: Any) -> _Engine | None:
        known = next((known for known in self._known if known.ref() is engine), None)
        if known is None and len(self._known) < _MOST and not hasattr(type(engine), "train_batch"):
            known = _Engine(engine)
            self._known.append(known)
        return known

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        import torch

        known = self._of(args[0])
        if known is not None and torch.is_grad_enabled() and args[0].module.training:
            known.forwards += 1

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._of(args[0])
        self._within += 1

    def _ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._within = max(0, self._within - 1)

    def _propagates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._depth += 1

    def _propagated(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._depth = max(0, self._depth - 1)
        for known in () if self._depth or raised else self._known:
            known.backwards += 1
            known.pending += 1

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._within += 1
        known, engine = self._of(args[0]), args[0]
        if known is None or self.over:
            return
        self.say("fed", "DeepSpeedEngine", "" if known.backwards else "an engine is asked to step with no backward pass since its last step")
        batches = int(engine.gradient_accumulation_steps())
        counts = getattr(engine, "managed_gradient_accumulation", None)
        if batches > 1 and known.backwards and (counts is None or counts()):
            known.gathered = known.gathered + 1 if known.backwards == known.forwards == batches else 0
            if known.gathered == _AGAIN or known.backwards == 1:
                self.say("counts", "DeepSpeedEngine", f"an engine that accumulates over {batches} batches is asked to step behind each {batches} of them alone" if known.gathered else "")

    def _stepped(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._within = max(0, self._within - 1)
        known = self._of(args[0])
        if known is None:
            return
        known.forwards = known.backwards = 0
        if args[0].was_step_applied():
            if known.pending and not self.over:
                self.say("clears", "DeepSpeedEngine")
            known.pending = 0

    def _clears(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._within or self._depth or self.over:
            return
        for known in self._known:
            if known.pending and self._concerns(known, args[0]):
                self.say("clears", "DeepSpeedEngine", "gradients are cleared between the batches of one update of an engine")
                known.pending = 0

    def _concerns(self, known: _Engine, what: Any) -> bool:
        engine = known.ref()
        if engine is None:
            return False
        if what in (engine, engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
            return True
        if hasattr(what, "param_groups"):
            return any(id(p) in known.params for group in what.param_groups for p in group["params"])
        return hasattr(what, "parameters") and any(id(p) in known.params for p in plainly.parameters(what))

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if "deepspeed" not in sys.modules:
            return
        for known in self._known:
            if self._concerns(known, args[0]):
                self.say("updates", "DeepSpeedEngine", "" if self._within else "the optimizer of an engine is stepped by the program")

    def _schedules(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        for known in self._known:
            engine = known.ref()
            if engine is not None and engine.lr_scheduler is args[0]:
                self.say("scheduled", "DeepSpeedEngine", "" if self._within else "the scheduler that an engine steps is stepped by the program, too")

    def _clips(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given = args[0] if args else (kwargs or {}).get("parameters")
        if self._within or not self._known or not isinstance(given, list | tuple):
            return
        read = self.sink.gradients(given)
        for known in self._known if read is not None else ():
            if known.backwards and any(id(p) in known.params for p in given):
                self.say("clipped", "DeepSpeedEngine", "" if any(grad is not None for grad in read or ()) else "gradients are clipped that an engine has taken out of the parameters")
