"""Calls that clip gradients: these are recorded before they are clipped, and the norm with what the program asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.optimizer import settings
from proctor.oracle.collect.optimizer.optimizers import Optimizers
from proctor.oracle.collect.progress import Progress


class Clipping:
    """What clips in one process.

    Args:
        progress: where the run is.
        optimizers: read gradients.
        guard: takes our errors.
    """

    def __init__(self, progress: Progress, optimizers: Optimizers, guard: RecordingGuard) -> None:
        self._progress, self._optimizers, self._guarded = progress, optimizers, guard.hook

    def install(self, patches: Replaced) -> None:
        """Patch what clips."""
        for module in (nn.utils, nn.utils.clip_grad):
            patches.wrap(module, "clip_grad_norm_", self._clipped)
            if hasattr(module, "clip_grads_with_norm_"):  # torch 2.6: by a norm that the program put together
                patches.wrap(module, "clip_grads_with_norm_", self._scaled)

    def _clipped(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._unclipped(args, kwargs)
        norm = original(*args, **kwargs)
        if self._progress.recording() and isinstance(norm, torch.Tensor):
            self._guarded(self._optimizers.after_clipping)(norm, args, kwargs)
        return norm

    def _scaled(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._unclipped(args, kwargs)
        return original(*args, **kwargs)

    def _unclipped(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gradients are about to be clipped; returns the arguments, of which nothing is read up."""
        if self._progress.recording():
            args, kwargs = settings.listed(args, kwargs)
            self._guarded(self._optimizers.before_clipping)(args[0] if args else kwargs.get("parameters"))
        return args, kwargs
