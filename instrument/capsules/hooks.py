"""When something of a step is kept: at the first act of a step, at batches, calls of modules and loss functions, backwards and updates.

`steps.acts` and `patch.taps` call these hooks; `Capsules` and, in a re-execution, `Replayer` say what is done then. Nothing is
done while a CUDA graph is captured, an error of ours ends at the guard, and no mode of the user's sees what is read.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

from proctor.instrument.capsules.rng import has_cuda
from proctor.instrument.capsules.step import HeldStep
from proctor.instrument.guard import Guard
from proctor.instrument.patch.patches import Hooks
from proctor.instrument.steps.clock import StepClock

NEXT: Final = "torch.utils.data.DataLoader.__next__"
SCALE: Final = "torch.amp.GradScaler.scale"


class CapsuleHooks(ABC):
    """Arguments as those of `Capsules`."""

    EVERY_STEP: ClassVar = frozenset({NEXT, SCALE})  # hooks that run in steps that are not kept, too
    current: HeldStep | None = None
    looks_next: Callable[[], bool] = staticmethod(lambda: True)  # whether the step to come is kept

    def __init__(self, clock: StepClock, guard: Guard, live: Callable[[], bool]) -> None:
        self.clock, self.guard, self._live = clock, guard, live
        import torch

        # Looked up once: in a step every object that is touched costs a cache miss.
        self._cuda: Any = torch.cuda if has_cuda() else None
        self._plainly: Any = torch._C.DisableTorchFunction
        self._seen_step = -1
        self._depth = 0  # calls of interest that contain each other
        self._scalers: dict[int, weakref.ref[Any]] = {}

    @abstractmethod
    def took(self, seconds: float) -> None: ...
    @abstractmethod
    def _step_opens(self) -> None: ...
    @abstractmethod
    def _finish(self, step: HeldStep) -> None: ...
    @abstractmethod
    def _batch(self, result: Any) -> None: ...
    @abstractmethod
    def _call(self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, opens: bool = False) -> None: ...
    @abstractmethod
    def _returned(self, what: str, result: Any) -> None: ...
    @abstractmethod
    def _backward(self, args: tuple[Any, ...]) -> None: ...
    @abstractmethod
    def _updated(self) -> None: ...

    def hooks(self) -> Hooks:
        """Functions to look at besides those at which the observer does."""
        import torch.nn.functional as functional

        found: Hooks = {NEXT: (None, self._loads), SCALE: (self._scales, None)}
        for name in vars(functional):
            if name.endswith(("_loss", "_entropy", "kl_div", "_with_logits")) and not name.startswith("_"):
                found[f"torch.nn.functional.{name}"] = self._around_loss(name)
        return found

    def clock_moved(self) -> None:
        """Step or phase changed: the first act of a step comes next."""
        if self.clock.step != self._seen_step:
            self._seen_step = self.clock.step
            self._depth = 0
            if self._live():
                self._run(self._step_opens)
            elif self.current is not None:  # this step is not recorded
                self._finish(self.current)
                self.current = None

    def model_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, opens: bool = False) -> None:
        """An outermost module is called.

        Args:
            opens: it is the first act of its step, which is open since this call came: no random number was drawn meanwhile.
        """
        self._depth += 1
        if self._depth == 1:
            self._run(self._call, "module", type(args[0]).__name__, args[1:], kwargs, opens)

    def model_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._run(self._returned, "module", result)

    def backward_begins(self, args: tuple[Any, ...]) -> None:
        """What the gradients are of."""
        self._run(self._backward, args)

    def update_ends(self) -> None:
        """An optimizer has stepped, and the tracker has looked."""
        self._run(self._updated)

    def _around_loss(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            self._depth += 1
            if self._depth == 1:
                self._run(self._call, "loss", name, args, kwargs)

        def after(args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
            self._depth = max(self._depth - 1, 0)
            if self._depth == 0:
                self._run(self._returned, "loss", result)

        return before, after

    def _loads(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._run(self._batch, result, always=True)

    def _scales(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._scalers.setdefault(id(args[0]), weakref.ref(args[0]))

    def _run(self, what: Callable[..., None], *args: Any, always: bool = False) -> None:
        if not (always or self._live()) or (self._cuda is not None and self._captures()):
            return
        started = time.perf_counter()
        with self._plainly():  # reading an attribute of a tensor must not run a mode of the user's
            self.guard.run("capsules", what, *args)
        self.took(time.perf_counter() - started)

    def _captures(self) -> bool:
        """Whether a graph is being captured, which is left alone."""
        return bool(self._cuda.is_initialized() and self._cuda.is_current_stream_capturing())
