"""Calls of outermost modules and backward passes: who asks for what is in a step goes through here.

Patched by the collector. A call that no other module made is either one for training, which `acts.py` is told, or one of an
evaluation, or of no concern; within both, what decides is seen (`decisions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import wrapt
from torch import nn

from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.collect.acts import Acts
from proctor.oracle.collect.choosing.decisions import Decisions
from proctor.oracle.collect.edges.crossings import Crossings
from proctor.oracle.collect.edges.regions import Regions
from proctor.oracle.collect.edges.taps import recomputing
from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.forwards import Forwards
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.replay.replayed import Replayed
from proctor.oracle.collect.tape import Tape


class Calls:
    """Those of one process.

    Args:
        progress: where the run is.
        models: that train.
        tape: records losses.
        crossings: see modules.
        decisions: see what a call decides.
        regions: that are compiled.
        acts: are told of training.
        replayed: exchanges what the program is given; `None` where nothing is.
        forwards: of a program that is looked at for its forwards; `None` of one that trains.
        guard: takes our errors.
    """

    def __init__(
        self,
        *,
        progress: Progress,
        models: Models,
        tape: Tape,
        crossings: Crossings,
        decisions: Decisions,
        regions: Regions,
        acts: Acts,
        replayed: Replayed | None,
        forwards: Forwards | None,
        guard: RecordingGuard,
    ) -> None:
        self._progress, self._models, self._tape, self._crossings = progress, models, tape, crossings
        self._decisions, self._regions, self._acts = decisions, regions, acts
        self._replayed, self._forwards, self._guarded = replayed, forwards, guard.hook
        self._losses = 0

    def install(self, patches: Replaced, *, watch_fp8: bool) -> None:
        """Patch calls of modules and backward passes.

        Args:
            patches: hold what is replaced.
            watch_fp8: casts to 8-bit floats, too.
        """
        patches.wrap(nn.Module, "__call__", self._called)
        patches.wrap(torch.autograd, "backward", self._backward)
        if watch_fp8:
            patches.wrap(torch.Tensor, "to", self._converted)
        trials = self._guarded(lambda stages: self._find_trials(stages, patches))
        wrapt.register_post_import_hook(trials, "torch.distributed.pipelining.stage")
        if self._replayed is not None:
            self._replayed.install(patches.wrap, lambda: not (self._inside() or self._progress.over or self._progress.boundary))

    def next_step(self) -> None:
        """Losses are counted by step."""
        self._losses = 0

    # -- modules --------------------------------------------------------------------------------------------

    def _inside(self) -> bool:
        """Whether a module of the user runs."""
        return self._crossings.running.depth > 0

    def _called(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        progress = self._progress
        outermost = not self._inside() and not progress.over and not recomputing()
        if outermost and self._forwards is not None:
            self._guarded(self._forwards.outermost)(module)
        elif outermost and not progress.trial and torch.is_grad_enabled():
            self._guarded(self._acts.forward)(module, args)
            if self._replayed is not None and progress.recording() and not progress.boundary:
                self._guarded(self._replayed.call)(args, kwargs)
            return self._outermost(original, module, *args, **kwargs)
        if self._evaluates(module):
            return self._outermost(original, module, *args, **kwargs)
        return self._crossings.call(original, module, *args, **kwargs)

    def _evaluates(self, module: nn.Module) -> bool:
        """Whether a forward without gradients begins, of a model that trains."""
        progress = self._progress
        if self._inside() or progress.trial or not progress.recording() or recomputing() or (torch.is_grad_enabled() and self._forwards is None):
            return False
        return self._models.knows(module)

    def _outermost(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._deciding(original, module, *args, **kwargs)
        except BaseException:
            self._crossings.running.abandon()
            raise

    def _deciding(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """An outermost call, whose decisions are seen; in compiled code nothing of ours may stand, so only that it draws is."""
        if self._regions.on and torch.compiler.is_compiling():
            return self._crossings.call(original, module, *args, **kwargs)
        if not self._regions.names:
            return self._decisions.around(self._crossings.call, original, module, *args, **kwargs)
        before = torch.random.default_generator.get_state()
        output = self._crossings.call(original, module, *args, **kwargs)
        self._tape.info.random |= not torch.equal(before, torch.random.default_generator.get_state())
        return output

    def _find_trials(self, stages: Any, patches: Replaced) -> None:
        """Pipeline stages first run forwards and backwards on empty tensors to learn shapes; that is no microbatch."""
        for cls in vars(stages).values():
            for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
                if not self._progress.over and isinstance(cls, type) and name in vars(cls):
                    patches.wrap(cls, name, self._on_trial)

    def _on_trial(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before, self._progress.trial = self._progress.trial, True
        try:
            return original(*args, **kwargs)
        finally:
            self._progress.trial = before

    def _converted(self, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self._crossings.casts_to_fp8()
        return result

    # -- backward passes ------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], /, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._forwards is not None:
            return original(tensors, *args, **kwargs)
        if self._acts.hides_backward():
            result = original(tensors, *args, **kwargs)
            self._guarded(self._acts.hidden_backward)()
            return result
        if self._progress.recording() and not self._progress.trial:
            self._guarded(self._acts.backward)()
        if self._progress.recording():
            self._guarded(self._loss)(tensors)
            if self._replayed is not None:
                self._replayed.backward()
            if self._crossings.ops is not None:
                with self._crossings.ops.backward():
                    return original(tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    def _loss(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if recomputing():
            return
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.is_floating_point():
                self._tape.scalar("loss", root, call=self._losses)
                self._losses += 1
