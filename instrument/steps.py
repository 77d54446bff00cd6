"""What calls of the program say: which step and phase it is in, and where its state may have changed. Hooks of one observer.

The clock (`context.py`, which says what a step is) is told of the acts that make one: forwards of outermost modules, backwards,
clearings, updates, batches that are fetched. Around each act that may change parameters, gradients, buffers or optimizer state
there is a look at them.

What runs inside of an update (the closure of LBFGS, Lightning's training step) is of the update's step, whatever it is: the update
has begun it. Only the first forward in there is told to the clock, since microbatches may have gone before. Buffers that forwards
in there change are looked at when the update ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proctor.instrument import catalog
from proctor.instrument._leaves import Lineage, inputs_of, leaves_of
from proctor.instrument._rounds import BY_HAND
from proctor.instrument.patches import Hooks
from proctor.instrument.state import Look, is_zero

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

KEPT_MODELS = 64  # that are remembered until a process is armed
LEAF_LOOKS = 64  # backwards below which leaves are looked for
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
        self._optimizer_count = self._scheduler_count = 0
        self._idle = False  # the present update can move nothing, and nothing was trained for it
        self._ran_inside = False  # a model, in the present update
        self._inner: list[int] = []  # optimizers that the present update has called
        self._updates = self._updates_before = 0  # that ended; when the present step of a loss scaler began
        self._called: dict[int, weakref.ref[Any]] = {}  # outermost models that trained before this process was armed
        self._leaf_looks = 0
        self._lineage = Lineage()
        self._asked: list[bool] = []  # whether each `torch.autograd.grad` that runs counts as a backward

    def hooks(self) -> Hooks:
        """Functions at which state may change, or that tell step and phase; constructors and calls of models are tapped apart."""
        found: Hooks = {
            "torch.Tensor.backward": self._guarded_write(self._backward_begins, self._backward_ends),
            "torch.autograd.backward": self._guarded_write(self._backward_begins, self._backward_ends),
            "torch.autograd.grad": self._guarded_write(self._grad_begins, self._grad_ends),
            "torch.nn.Module.zero_grad": self._guarded_write(self._module_zero_grad, self._grads_changed),
            "torch.nn.Module.load_state_dict": (None, self._data_changed),
            "torch.nn.utils.clip_grad_norm_": self._guarded_write(self._grads_change, self._grads_changed),
            "torch.nn.utils.clip_grad_value_": self._guarded_write(self._grads_change, self._grads_changed),
            "torch.amp.GradScaler.unscale_": self._guarded_write(self._grads_change, self._grads_rewritten),
            "torch.save": (self._save_begins, self._checkpoint_ends),
            "torch.load": (self._checkpoint_begins, self._checkpoint_ends),
            "torch.amp.GradScaler.step": (self._scaled_begins, self._scaled_ends),
            "torch.utils.data.DataLoader.__next__": (None, self._batch_fetched),
        }
        found |= dict.fromkeys(catalog.INITIALISERS, (self._model_is_built, None))
        return found | dict.fromkeys(catalog.COLLECTIVES, (None, self._collective_done))

    def _guarded_write(self, before: Callable[..., None], after: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks of a call that writes gradients, so that no other thread reads them meanwhile."""
        turns = self._observer.turns

        def begins(args: tuple[Any, ...], kwargs: Any) -> None:
            turns.begin_write()
            before(args, kwargs)

        def ends(args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
            turns.end_write()
            after(args, kwargs, result, raised)

        return begins, ends

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
            "step": self._guarded_write(self._update_begins, self._update_ends),
            "zero_grad": self._guarded_write(self._optimizer_zero_grad, self._grads_changed),
            "load_state_dict": (None, self._optimizer_loaded),
            "add_param_group": (None, self._group_added),
        })
        self._observer.arm("an optimizer was constructed")
        self._clock.optimizer_created(_key(optimizer))
        label = f"#{self._optimizer_count}"
        self._optimizer_count += 1
        self._observer.name(optimizer, label)
        self._guard.run("state", self._observer.tracker.add_optimizer, optimizer, label)
        self._look(0, 0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)

    def _group_added(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self._observer.armed and not raised:
            self._guard.run("state", self._observer.tracker.refresh_optimizer, args[0])

    def _optimizer_loaded(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, optimizer=Look.FORCE)

    def scheduler_created(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Before that of a learning-rate scheduler, which signatures call by its optimizer: `#0~0`, `#0~1`."""
        self._observer.taps.of_class(type(args[0]), "torch.optim.lr_scheduler.LRScheduler", catalog.SCHEDULER_METHODS, {})
        optimizer = args[1] if len(args) > 1 else (kwargs or {}).get("optimizer", getattr(args[0], "optimizer", None))
        label = self._observer.tracker.names.get(id(optimizer)) if optimizer is not None else None
        if label is not None and id(args[0]) not in self._observer.tracker.names:
            self._scheduler_count += 1
            self._observer.name(args[0], f"{label}~{self._scheduler_count - 1}")

    def _update_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._updating += 1
        if self._updating > 1:
            self._inner.append(_key(args[0]))
            return
        self._inner.clear()
        self._ran_inside = False
        self._idle = self._clock.at_rest(_key(args[0])) and not _has_closure(args, kwargs) and moves_nothing(args[0])
        if not self._idle:
            self._clock.update_begins(_key(args[0]))
        if self._observer.armed:
            self._guard.run("state", self._observer.tracker.note_lr, args[0])
        self._look(0, data=Look.HINT, grad=Look.HINT, buffers=Look.FORCE)

    def _update_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._updating -= 1
        if self._updating > 0:
            return
        self._updating = 0
        buffers = Look.FORCE if self._ran_inside else Look.SKIP
        self._look(1, data=Look.FORCE, grad=Look.HINT, buffers=buffers, optimizer=Look.FORCE)
        if self._idle:
            return
        self._observer.glance()
        if self._observer.capsules is not None:
            self._observer.capsules.update_ends()
        self._updates += 1
        self._clock.update_ends(_key(args[0]), tuple(self._inner))

    def _scaled_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._updates_before = self._updates

    def _scaled_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """A loss scaler steps an optimizer, or skips it where gradients are not finite."""
        optimizer = args[1] if len(args) > 1 else (kwargs or {}).get("optimizer")
        if not raised and not self._updating and self._updates == self._updates_before and optimizer is not None:
            self._clock.update_ends(_key(optimizer))

    def _batch_fetched(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._clock.fetched()

    def _optimizer_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._updating:  # in a closure, or by an optimizer that clears at the end of its step: of this step
            self._clock.zero_grad(_key(args[0]), self._moved)

    def _module_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self.by_hand()
        if not self._updating:
            self._clock.zero_grad(None, self._moved)

    def _without_optimizer(self) -> bool:
        return not self._optimizer_count and not self._observer.inert and not self._updating

    def _find_leaves(self, args: tuple[Any, ...]) -> bool:
        """Before a backward in a program that has no optimizer: what it may train are the leaves of its graph.

        Returns:
            whether they are new tensors that took the place of those of the backward before.
        """
        if self._leaf_looks >= LEAF_LOOKS and not self._lineage.followed:
            return False
        return self._trains(leaves_of(args))

    def _trains(self, leaves: list[tuple[str, Any]]) -> bool:
        """Track what is differentiated by; whether it took the place of what was."""
        self._leaf_looks += 1
        for ref in self._called.values():
            model = ref()
            if model is not None and not self._observer.tracker.knows(model):
                self._observer.tracker.add_model(model)
        self._called.clear()
        gone = self._lineage.follow(leaves)
        self._observer.tracker.forget(gone)
        self._observer.tracker.add_leaves(leaves)
        return bool(gone)

    def by_hand(self, backward: bool = False, replaced: bool = False) -> None:
        """Where there is no optimizer, an update is that parameters have another value than at the backward before.

        Args:
            backward: one begins now.
            replaced: it is of new tensors that took the place of those of the backward before.
        """
        pending = self._clock.backward_pending
        if not (pending or backward) or not self._without_optimizer():
            return
        if not self._observer.armed and self._leaf_looks >= LEAF_LOOKS:
            return  # it asks for gradients and trains nothing
        if (self._guard.run("state", self._observer.tracker.moved) or replaced) and pending:
            self._observer.arm("parameters were updated by hand")
            self._look(0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)
            self._updates += 1
            self._clock.update_ends(BY_HAND)

    def _moved(self) -> bool:
        """Whether parameters were written since the last backward, before any update: by hand, for another backward."""
        return self._observer.armed and self._observer.tracker.watches("data") and self._observer.tracker.wrote_data()

    def model_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Before a call of an outermost module."""
        step = self._clock.step
        self._forward_begins(args, kwargs)
        if self._observer.capsules is not None:
            self._observer.capsules.model_begins(args, kwargs, opens=self._clock.step != step)

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        import torch

        if self._in_backward:
            return
        self.by_hand()
        if self._updating:
            if not self._ran_inside:
                self._ran_inside = True
                self._clock.forward(bool(args[0].training) and torch.is_grad_enabled())
            return
        if not self._observer.armed and self._observer.recorder.pending >= PRE_ARM_ROWS:
            self._observer.recorder.enabled = False  # a process that runs models and does not train
        module = args[0]
        training = bool(module.training) and torch.is_grad_enabled()
        if training and not self._observer.armed and len(self._called) < KEPT_MODELS:
            self._called[id(module)] = weakref.ref(module)
        self._clock.forward(training, training and _asks_gradient(args))
        if training and self._observer.armed:
            if self._clock.step == 0:
                self._guard.run("state", self._observer.tracker.rescan, 0)  # a layer replaced after the optimizer was built
            if not self._observer.tracker.knows(module) and self._clock.step >= 0 and any(True for _ in module.parameters()):
                self._guard.run("state", self._observer.tracker.add_model, module)
            self._look(0, data=Look.HINT, grad=Look.HINT)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._in_backward += 1
        if self._in_backward > 1:
            return
        if self._without_optimizer():
            self.by_hand(backward=True, replaced=bool(self._guard.run("state", self._find_leaves, args)))
        self._backward_runs(args)

    def _backward_runs(self, args: tuple[Any, ...]) -> None:
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

    def _grad_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """`torch.autograd.grad` is a backward where there is no optimizer; beside one it is a penalty, or an attack on an input."""
        counts = not self._in_backward and self._without_optimizer() and (self._observer.armed or self._leaf_looks < LEAF_LOOKS)
        self._asked.append(counts)
        if not counts:
            return
        self._in_backward += 1
        replaced = self._guard.run("state", lambda: self._trains(inputs_of(args, kwargs)))
        self.by_hand(backward=True, replaced=bool(replaced))
        self._backward_runs(args)

    def _grad_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self._asked and self._asked.pop():
            self._backward_ends(args, kwargs, result, raised)

    def _grads_change(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._look(0, grad=Look.HINT)  # what others wrote before is not of this call

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


def _key(optimizer: Any) -> int:
    """What the clock calls an optimizer: optimizers of the same parameters are one (a wrapper, one for each task)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            return id(p)
    return id(optimizer)


def moves_nothing(optimizer: Any) -> bool:
    """Whether an update changes no parameter for sure: no gradient, or a learning rate of 0 in all groups."""
    groups = optimizer.param_groups
    return all(is_zero(group.get("lr")) for group in groups) or all(p.grad is None for group in groups for p in group["params"])


def _has_closure(args: tuple[Any, ...], kwargs: Any) -> bool:
    return any(callable(value) for value in (*args[1:], *(kwargs or {}).values()))


def _asks_gradient(args: tuple[Any, ...]) -> bool:
    """Whether a tensor that a model is given requires a gradient."""
    import torch

    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args[1:])
