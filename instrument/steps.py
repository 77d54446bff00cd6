"""What calls of the program say: which step and phase it is in, and where its state may have changed. Hooks of one observer.

The clock is told of the acts that make a step; around each act that may change parameters, gradients, buffers or optimizer state there
is a look at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.instrument import catalog
from proctor.instrument.patches import Hooks
from proctor.instrument.state import Look

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

PRE_ARM_ROWS = 50_000  # records kept from before the first training act


class Steps:
    """The acts of a training loop.

    Args:
        observer: whose clock is told, and which looks at state.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._clock, self._contexts, self._guard, self._look = observer.clock, observer.contexts, observer.guard, observer.look
        self._phase_before = "init"
        self._in_backward = 0
        self._updating = 0
        self._building = False  # a layer has been initialised
        self._optimizer_count = 0

    def hooks(self) -> Hooks:
        """Functions at which state may change, or that tell step and phase; constructors and calls of models are tapped apart."""
        found: Hooks = {
            "torch.Tensor.backward": (self._backward_begins, self._backward_ends),
            "torch.autograd.backward": (self._backward_begins, self._backward_ends),
            "torch.nn.Module.zero_grad": (self._module_zero_grad, self._grads_changed),
            "torch.nn.Module.load_state_dict": (None, self._data_changed),
            "torch.nn.utils.clip_grad_norm_": (None, self._grads_changed),
            "torch.nn.utils.clip_grad_value_": (None, self._grads_changed),
            "torch.amp.GradScaler.unscale_": (None, self._grads_rewritten),
            "torch.save": (self._save_begins, self._checkpoint_ends),
            "torch.load": (self._checkpoint_begins, self._checkpoint_ends),
        }
        found |= dict.fromkeys(catalog.INITIALISERS, (self._model_is_built, None))
        return found | dict.fromkeys(catalog.COLLECTIVES, (None, self._collective_done))

    def _model_is_built(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """The first layer fills its parameters: time to observe the user's own functions, so that what runs before
        the first optimizer (sizes, totals, a library's set-up) is seen."""
        if not self._building and not self._observer.inert:
            self._building = True
            self._guard.run("user code", self._observer.user.sweep)

    def optimizer_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """After `Optimizer.__init__`: this process trains, and its state has names now."""
        if raised or self._observer.inert:
            return
        optimizer = args[0]
        self._observer.taps.of_class(type(optimizer), "torch.optim.Optimizer", catalog.OPTIMIZER_METHODS, {
            "step": (self._update_begins, self._update_ends),
            "zero_grad": (self._optimizer_zero_grad, self._grads_changed),
            "load_state_dict": (None, self._optimizer_loaded),
            "add_param_group": (None, self._group_added),
        })
        self._observer.arm("an optimizer was constructed")
        self._clock.optimizer_created(id(optimizer))
        label = f"#{self._optimizer_count}"
        self._optimizer_count += 1
        self._observer.name(optimizer, label)
        self._observer.tracker.add_optimizer(optimizer, label)
        self._look(0, 0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)

    def _group_added(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self._observer.armed and not raised:
            self._observer.tracker.refresh_optimizer(args[0])

    def _optimizer_loaded(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, optimizer=Look.FORCE)

    def scheduler_created(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Before that of a learning-rate scheduler."""
        self._observer.taps.of_class(type(args[0]), "torch.optim.lr_scheduler.LRScheduler", catalog.SCHEDULER_METHODS, {})

    def _update_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._updating += 1
        if self._updating > 1:
            return
        self._clock.update_begins(id(args[0]))
        if self._observer.armed:
            self._observer.tracker.note_lr(args[0])
        self._look(0, data=Look.HINT, grad=Look.HINT, buffers=Look.FORCE)

    def _update_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._updating -= 1
        if self._updating > 0:
            return
        self._updating = 0
        self._look(1, data=Look.FORCE, grad=Look.HINT, optimizer=Look.FORCE)
        if self._observer.capsules is not None:
            self._observer.capsules.update_ends()
        self._clock.update_ends(id(args[0]))

    def _optimizer_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._updating:  # in a closure, or by an optimizer that clears at the end of its step: of this step
            self._clock.zero_grad(id(args[0]))

    def _module_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._updating:
            self._clock.zero_grad(None)

    def model_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Before a call of an outermost module."""
        step = self._clock.step
        self._forward_begins(args, kwargs)
        if self._observer.capsules is not None:
            self._observer.capsules.model_begins(args, kwargs, opens=self._clock.step != step)

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        import torch

        if self._in_backward or self._updating:
            return
        if not self._observer.armed and self._observer.recorder.pending >= PRE_ARM_ROWS:
            self._observer.recorder.enabled = False  # a process that runs models and does not train
        module = args[0]
        training = bool(module.training) and torch.is_grad_enabled()
        self._clock.forward(training)
        if training and self._observer.armed:
            if self._clock.step == 0:
                self._guard.run("rescan", self._observer.tracker.rescan, 0)  # a layer replaced after the optimizer was built
            if not self._observer.tracker.knows(module) and self._clock.step >= 0 and any(True for _ in module.parameters()):
                self._observer.tracker.add_model(module)
            self._look(0, data=Look.HINT, grad=Look.HINT)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._in_backward += 1
        if self._in_backward > 1:
            return
        self._clock.backward()
        self._look(0, data=Look.HINT, grad=Look.HINT)
        if self._observer.capsules is not None:
            self._observer.capsules.backward_begins(args)
        self._contexts.recompute += 1
        self._observer.clock_moved()

    def _backward_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._in_backward -= 1
        if self._in_backward > 0:
            return
        self._in_backward = 0
        self._contexts.recompute = 0
        self._observer.clock_moved()
        self._look(1, grad=Look.FORCE)

    def _grads_changed(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.HINT)

    def _grads_rewritten(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.FORCE)

    def _data_changed(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, data=Look.FORCE, buffers=Look.FORCE)

    def _collective_done(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._observer.tracker.dirty = True

    def _save_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._look(0, data=Look.FORCE, buffers=Look.FORCE, optimizer=Look.FORCE)  # what is saved is compared with it
        self._checkpoint_begins(args, kwargs)

    def _checkpoint_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._phase_before = self._clock.checkpoint(True)

    def _checkpoint_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._clock.checkpoint(False, self._phase_before)
