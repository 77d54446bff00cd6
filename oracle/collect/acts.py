"""What a program does that makes steps: training forwards, backward passes, clearings, updates. It is told to the step clock here.

Called by the collector, whose patches see the calls. When the clock has begun another step, the recording follows at the next
module's edge (`crossings.py`), or at once where no forward begins the step: a backward pass, or a second update, of what ran before.

Compiled code shows none of this. There an update is that parameters have moved since the last backward pass, and a model whose own
call is a part of something compiled is found when its parameters have gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from proctor.instrument.patch.replaced import Replaced
from proctor.instrument.steps.rounds import BY_HAND
from proctor.instrument.steps.signs import asks_gradient, key_of, moves_nothing
from proctor.oracle.collect.edges.regions import Regions, anything_compiled
from proctor.oracle.collect.edges.taps import recomputing
from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.optimizer.optimizers import Optimizers, asked_for
from proctor.oracle.collect.progress import Progress


class Host(Protocol):
    """What is asked of a collector."""

    def discover(self, called: nn.Module) -> None:
        """Watch the modules of models that were not known."""

    def begin(self) -> None:
        """Begin to record."""

    def next_step(self) -> None:
        """Go on to the next step."""

    def updated_again(self) -> None:
        """The step that is recorded is followed by an update for which nothing was trained."""


class Acts:
    """The training loop of one process.

    Args:
        host: records.
        progress: has the clock.
        models: that train.
        optimizers: read what they use.
        regions: that are compiled.
        guard: takes our errors.
    """

    def __init__(self, host: Host, progress: Progress, models: Models, optimizers: Optimizers, regions: Regions, guard: RecordingGuard) -> None:
        self._host, self._progress, self._models, self._optimizers, self._regions = host, progress, models, optimizers, regions
        self._clock, self._guarded = progress.clock, guard.hook
        self._hooks = 0  # of an optimizer, that run now
        self._left: list[Any] = []  # handles of hooks that are idle
        self._inner: list[int] = []  # optimizers that the present update has called
        self._idle = False  # the present update can move nothing, and nothing was trained for it
        self._ran_inside = False  # a model, in the present update
        self._updates = 0
        self._hidden = False  # the model's forward is compiled as a part of something else

    def install(self, patches: Replaced) -> None:
        """Patch what tells of updates."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import dataloader

        patches.wrap(torch.optim.Optimizer, "zero_grad", self._zeroed)
        patches.wrap(nn.Module, "zero_grad", self._zeroed_by_hand)
        patches.wrap(torch.amp.GradScaler, "step", self._scaled)
        patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._fetched)
        for handle in (
            register_optimizer_step_pre_hook(self._hook(self._guarded(self._update_begins))),
            register_optimizer_step_pre_hook(self._hook(self._optimizers.asking(self._guarded(self._optimizers.record_gradients)))),
            register_optimizer_step_post_hook(self._hook(self._guarded(self._update_ends))),
        ):
            patches.hold(functools.partial(self._take_off, handle))

    def _hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook of optimizers that is idle when the recording is over. torch goes through its hooks as they are, so none may be taken off meanwhile."""

        def run(*args: Any) -> Any:
            if self._progress.over:
                return None
            self._hooks += 1
            try:
                return hook(*args)
            finally:
                self._hooks -= 1

        return run

    def _take_off(self, handle: Any) -> None:
        if self._hooks:
            self._left.append(handle)
        else:
            handle.remove()

    def remove(self) -> None:
        """Take off what could not be when the recording ended in an optimizer's hook."""
        while self._left and not self._hooks:
            self._left.pop().remove()

    def cross(self) -> None:
        """Let the recording follow the clock."""
        if self._progress.boundary:
            self._host.next_step()

    # -- forwards and backward passes -----------------------------------------------------------------------

    def forward(self, module: nn.Module, args: Any) -> None:
        """A module is called for training that no other module called.

        What counts is that gradients are computed, not `training`: a program may train in eval mode.
        """
        progress = self._progress
        if not self._models.knows(module):
            if not any(p.requires_grad for p in module.parameters()) and not progress.begun:
                return  # not training yet
            self._host.discover(module)
        self.look()
        if not (progress.stepping and self._ran_inside):
            self._ran_inside = bool(progress.stepping)
            self._clock.forward(True, asks_gradient((module, *args)))
        if not progress.begun:
            self._host.begin()

    def backward(self) -> None:
        """A backward pass begins, or has run unseen; not one within another."""
        if not recomputing():
            self._clock.backward()
            self.cross()
        self._optimizers.note_versions()

    def hides_backward(self) -> bool:
        """Whether gradients that are computed now may be those of a model whose call is not seen."""
        progress = self._progress
        return self._regions.on and not progress.over and not progress.trial and (self._hidden or not progress.begun)

    def hidden_backward(self) -> None:
        """Gradients came to parameters of a model whose call was never seen: a compiled function calls it."""
        self._hidden_update()
        if not self._progress.begun and anything_compiled():
            trained = [r for r in self._models.modules.roots() if any(p.grad is not None for p in r.parameters())]
            if not trained:
                return
            self._hidden = True
            self._host.discover(trained[0])
            self._regions.names.add(self._models.name_of(trained[0]))
            self._host.begin()
        if self._progress.begun:
            self.backward()

    # -- updates --------------------------------------------------------------------------------------------

    def made(self, optimizer: Any) -> None:
        """An optimizer was made."""
        self._optimizers.add(optimizer)
        self._clock.optimizer_created(key_of(optimizer))

    def adopt(self) -> None:
        """Take notice of optimizers that were made before; those of the models that train take part in steps."""
        for optimizer in self._optimizers.adopt():
            if any(id(p) in self._models.names.parameters for group in optimizer.param_groups for p in group["params"]):
                self._clock.optimizer_created(key_of(optimizer))

    def look(self) -> None:
        """See whether parameters were updated unseen: in compiled code, or by the program itself."""
        self._hidden_update()
        if self._progress.recording() and self._clock.backward_pending and self._optimizers.updated_by_hand():
            self._clock.update_ends(BY_HAND)

    def _hidden_update(self) -> None:
        progress = self._progress
        if self._regions.on and self._clock.backward_pending and not progress.stepped and not progress.stepping and anything_compiled():
            for optimizer in self._optimizers.moved():
                self._update_begins(optimizer, (), {})
                self._update_ends(optimizer, (), {})

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping, key = self._progress.stepping, key_of(optimizer)
        if id(optimizer) in stepping:  # its step before was ended by an exception
            del stepping[stepping.index(id(optimizer)) :]
        asks = asked_for(args, kwargs) is not None
        if stepping:
            self._inner.append(key)
        else:
            self._inner.clear()
            self._ran_inside = False
            rests = self._clock.at_rest(key)
            self._idle = rests and not asks and moves_nothing(optimizer)
            if not self._idle:
                self._clock.update_begins(key)
                if rests and not asks and self._progress.boundary and self._progress.stepped:  # what asks for its loss trains within the update
                    self._host.updated_again()
                self.cross()
        stepping.append(id(optimizer))
        if not self._idle:
            self._optimizers.before_update(optimizer, asks=asks)

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepping = self._progress.stepping
        if id(optimizer) in stepping:
            del stepping[stepping.index(id(optimizer)) :]
        if self._idle:
            return
        self._optimizers.after_update(optimizer)
        if not stepping:
            self._updates += 1
            self._clock.update_ends(key_of(optimizer), tuple(self._inner))

    # -- what the patches see -------------------------------------------------------------------------------

    def _scaled(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A loss scaler steps an optimizer, or skips it where gradients are not finite."""
        before = self._updates
        result = original(*args, **kwargs)
        optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
        if optimizer is not None and self._updates == before and not self._progress.stepping:
            self._guarded(lambda: self._clock.update_ends(key_of(optimizer)))()
        return result

    def _fetched(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        self._clock.fetched()
        return batch

    def _zeroed(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._clears)(args[0])
        return original(*args, **kwargs)

    def _zeroed_by_hand(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._clears)(None)
        return original(*args, **kwargs)

    def _clears(self, optimizer: Any) -> None:
        if not self._progress.stepping:  # in a closure, or by an optimizer that clears at the end of its step: of this step
            self.look()
            # What something else than an optimizer has moved is a trial before the update (sharpness-aware minimization).
            self._clock.zero_grad(None if optimizer is None else key_of(optimizer), lambda: bool(self._optimizers.moved()))
