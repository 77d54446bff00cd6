"""What calls of the program say: which step and phase it is in, and where its state may have changed. Hooks of one observer.

The clock (`clock.py`, which says what a step is) is told of the acts that make one: forwards of outermost modules, backwards,
clearings, updates, batches that are fetched. Around each act that may change parameters, gradients, buffers or optimizer state
there is a look at them.

`updates` has the acts of optimizers, `by_hand` what trains without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from proctor.instrument.observe import plainly
from proctor.instrument.observe.state import Look
from proctor.instrument.patch import catalog
from proctor.instrument.patch.patches import Hooks
from proctor.instrument.steps.by_hand import LEAF_LOOKS, ByHand
from proctor.instrument.steps.leaves import inputs_of
from proctor.instrument.steps.modes import TrainsInEval
from proctor.instrument.steps.signs import asks_gradient
from proctor.instrument.steps.turns import guarded_write
from proctor.instrument.steps.updates import Updates

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

FORWARDS_LOOKED_AT = 16  # of outermost modules, between two backwards
FEW = 8  # parameters that are clipped together and are looked at alone
PRE_ARM_ROWS = 50_000  # records kept from before the first training act


class Steps:
    """The acts of a training loop.

    Args:
        observer: whose clock is told, and which looks at state.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._clock, self._contexts, self._guard, self._look = observer.clock, observer.contexts, observer.guard, observer.look
        self.updates = Updates(observer)
        self.by_hand = ByHand(observer, self.updates)
        self._in_eval = TrainsInEval()
        self._phase_before = "init"
        self.in_backward = 0
        self._forwards, self._forwards_at = 0, (-1, 0)  # since the last backward, of which step and microbatch
        self._building = False  # a layer has been initialised
        self._asked: list[bool] = []  # whether each `torch.autograd.grad` that runs counts as a backward

    def hooks(self) -> Hooks:
        """Functions at which state may change, or that tell step and phase; constructors and calls of models are tapped apart."""
        turns, updates = self._observer.turns, self.updates
        found: Hooks = {
            "torch.Tensor.backward": guarded_write(turns, self._backward_begins, self._backward_ends),
            "torch.autograd.backward": guarded_write(turns, self._backward_begins, self._backward_ends),
            "torch.autograd.grad": guarded_write(turns, self._grad_begins, self._grad_ends),
            "torch.nn.Module.zero_grad": guarded_write(turns, self._module_zero_grad, self.grads_changed),
            "torch.nn.Module.load_state_dict": (None, self._data_changed),
            "torch.nn.utils.clip_grad_norm_": guarded_write(turns, self._grads_change, self._clipped),
            "torch.nn.utils.clip_grad_value_": guarded_write(turns, self._grads_change, self._clipped),
            "torch.amp.GradScaler.unscale_": guarded_write(turns, self._grads_change, self._grads_rewritten),
            "torch.save": (self._save_begins, self._checkpoint_ends),
            "torch.load": (self._checkpoint_begins, self._checkpoint_ends),
            "torch.amp.GradScaler.step": (updates.scaled_begins, updates.scaled_ends),
            "torch.utils.data.DataLoader.__next__": (None, self._batch_fetched),
        }
        found |= dict.fromkeys(catalog.INITIALISERS, (self._model_is_built, None))
        return found | dict.fromkeys(catalog.COLLECTIVES, (None, self._collective_done))

    def only_look(self) -> set[str]:
        """Of these those that tell no step: where nothing is looked at they need not run."""
        return {
            "torch.nn.Module.load_state_dict", "torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_",
            "torch.amp.GradScaler.unscale_",
        }  # fmt: skip

    def _model_is_built(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """The first layer fills its parameters: time to observe the user's own functions, so that what runs before
        the first optimizer (sizes, totals, a library's set-up) is seen."""
        if not self._building and not self._observer.inert:
            self._building = True
            self._guard.run("user code", self._observer.user.sweep)

    def _batch_fetched(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._clock.fetched()

    def _module_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self.by_hand.look()
        if not self.updates.depth:
            self._clock.zero_grad(None, self.by_hand.moved)

    def model_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Before a call of an outermost module."""
        step = self._clock.step
        self._forward_begins(args, kwargs)
        if self._observer.capsules is not None:
            self._observer.capsules.model_begins(args, kwargs, opens=self._clock.step != step)

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if self.in_backward:
            return
        if self._clock.backward_pending:
            self.by_hand.look()
        if self.updates.depth:
            if not self.updates.ran_inside:
                self.updates.ran_inside = True
                self._clock.forward(bool(args[0].training) and torch.is_grad_enabled())
            return
        if not self._observer.armed and self._observer.recorder.pending >= PRE_ARM_ROWS:
            self._observer.recorder.enabled = False  # a process that runs models and does not train
        module = args[0]
        grad = torch.is_grad_enabled()
        training = bool(self._guard.run("steps", self._in_eval.called, module, grad)) or (grad and bool(module.training))
        if training:
            self._observer.turns.acts()
        probing = training and asks_gradient(args)
        if training and not self._observer.armed:
            self.by_hand.called(module)
        self._clock.forward(training, probing)
        if training and self._observer.armed:
            if self._clock.step == 0:
                self._guard.run("state", self._observer.tracker.rescan, 0)  # a layer replaced after the optimizer was built
                for _, optimizer in self._observer.tracker.optimizers():
                    self._guard.run("state", self._observer.tracker.let_go, optimizer)
            if not self._observer.tracker.knows(module) and self._clock.step >= 0 and any(True for _ in plainly.parameters(module)):
                self._guard.run("state", self._observer.tracker.add_model, module)
            self._look_at_forward()

    def _look_at_forward(self) -> None:
        """A model that is called hundreds of times between two backwards (a solver, a rollout) is not looked at before each: what changes between its calls is seen at the backward."""
        place = self._clock.step, self._clock.micro
        self._forwards = self._forwards + 1 if place == self._forwards_at else 1
        self._forwards_at = place
        if self._forwards <= FORWARDS_LOOKED_AT:
            self._look(0, data=Look.HINT, grad=Look.HINT)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self.in_backward += 1
        if self.in_backward > 1:
            return
        if self.by_hand.applies():
            self.by_hand.look(backward=True, replaced=bool(self._guard.run("state", self.by_hand.find, args)))
        self._backward_runs(args)

    def _backward_runs(self, args: tuple[Any, ...]) -> None:
        self._guard.run("steps", self._in_eval.backward_begins)
        self._clock.backward()
        self._look(0, data=Look.HINT, grad=Look.HINT)
        if self._observer.capsules is not None:
            self._observer.capsules.backward_begins(args)
        self._contexts.recompute += 1
        self._observer.clock_moved()

    def _backward_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self.in_backward -= 1
        if self.in_backward > 0:
            return
        self.in_backward = 0
        self._contexts.recompute = 0
        self._observer.clock_moved()
        if self._guard.run("steps", self._in_eval.backward_ends) and self._observer.sleep is not None:
            self._observer.sleep.refuse()  # taps tell a training forward by its mode alone
        self._look(1, grad=Look.FORCE)
        if self.by_hand.applies():
            self._observer.turns.updated()

    def _grad_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """`torch.autograd.grad` is a backward where there is no optimizer; beside one it is a penalty, or an attack on an input."""
        counts = not self.in_backward and self.by_hand.applies() and (self._observer.armed or self.by_hand.looks < LEAF_LOOKS)
        self._asked.append(counts)
        if not counts:
            return
        self.in_backward += 1
        replaced = self._guard.run("state", lambda: self.by_hand.trains(inputs_of(args, kwargs)))
        self.by_hand.look(backward=True, replaced=bool(replaced))
        self._backward_runs(args)

    def _grad_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self._asked and self._asked.pop():
            self._backward_ends(args, kwargs, result, raised)

    def _grads_change(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._look(0, grad=Look.HINT, of=_few(args, kwargs))  # what others wrote before is not of this call

    def grads_changed(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.HINT)

    def _clipped(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.HINT, of=_few(args, kwargs))

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


def _few(args: tuple[Any, ...], kwargs: Any) -> list[int] | None:
    """Ids of the parameters that a call clips, where they are few: an optimizer that clips each by itself would have all of them looked at as often as it has parameters."""
    given: Any = args[0] if args else (kwargs or {}).get("parameters")
    if isinstance(given, torch.Tensor):
        return [id(given)]
    return [id(p) for p in given] if type(given) in (list, tuple) and len(given) <= FEW else None
