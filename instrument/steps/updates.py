"""Acts of optimizers, loss scalers and schedulers: made, stepped, cleared, loaded.

`acts` lays these hooks. The clock is told when an update begins and ends; parameters are looked at around it.

What runs inside of an update (the closure of LBFGS, Lightning's training step) is of the update's step, whatever it is: the update
has begun it. Only the first forward in there is told to the clock, since microbatches may have gone before. Buffers that forwards
in there change are looked at when the update ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.observe.state import Look
from proctor.instrument.patch import catalog
from proctor.instrument.steps.signs import has_closure, key_of, moves_nothing
from proctor.instrument.steps.turns import guarded_write

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

WRITES_LOOKED_FOR: Final = 16  # updates


class Updates:
    """Optimizers of one process.

    Args:
        observer: whose clock is told, and which looks at state.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._clock, self._guard, self._look = observer.clock, observer.guard, observer.look
        self.depth = 0  # updates that run inside each other
        self.done = 0  # that ended
        self._begun = 0
        self._done_before = 0  # when the present step of a loss scaler began
        self.optimizers = self._scheduler_count = 0  # that were made
        self.ran_inside = False  # a model, in the present update
        self._idle = False  # the present update can move nothing, and nothing was trained for it
        self._inner: list[int] = []  # optimizers that the present update has called

    def optimizer_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """After `Optimizer.__init__`: this process trains, and its state has names now."""
        if raised or self._observer.inert:
            return
        optimizer = args[0]
        self._observer.taps.of_class(type(optimizer), "torch.optim.Optimizer", catalog.OPTIMIZER_METHODS, {
            "step": guarded_write(self._observer.turns, self._update_begins, self._update_ends),
            "zero_grad": guarded_write(self._observer.turns, self._optimizer_zero_grad, self._observer.steps.grads_changed),
            "load_state_dict": (None, self._optimizer_loaded),
            "add_param_group": (None, self._group_added),
        })
        self._observer.arm("an optimizer was constructed")
        if self._observer.sleep is not None:
            self._observer.sleep.knows(optimizer)
        self._clock.optimizer_created(key_of(optimizer))
        label = f"#{self.optimizers}"
        self.optimizers += 1
        self._observer.name(optimizer, label)
        self._guard.run("state", self._observer.tracker.add_optimizer, optimizer, label)
        self._look(0, 0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)

    def _group_added(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self._observer.armed and not raised:
            self._guard.run("state", self._observer.tracker.refresh_optimizer, args[0])
            if self._observer.sleep is not None:
                self._observer.sleep.knows(args[0])

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
        self.depth += 1
        if self.depth > 1:
            self._inner.append(key_of(args[0]))
            return
        self._inner.clear()
        self.ran_inside = False
        self._idle = self._clock.at_rest(key_of(args[0])) and not has_closure(args, kwargs) and moves_nothing(args[0])
        if not self._idle:
            self._clock.update_begins(key_of(args[0]))
        if self._observer.armed and self._observer.sampled:
            self._guard.run("state", self._observer.tracker.note_update, args[0])
        self._look(0, data=Look.FORCE if self._writes_are_looked_for() else Look.HINT, grad=Look.HINT, buffers=Look.FORCE)

    def _writes_are_looked_for(self) -> bool:
        """Before the first updates, and before some later ones, parameters are hashed: what writes past version counters between updates (`p.data.clamp_()`), as a checkpoint would show, is known then."""
        self._begun += 1
        return self._begun <= WRITES_LOOKED_FOR or self._begun & (self._begun - 1) == 0

    def _update_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        self.depth = 0
        self._observer.turns.updated(key_of(args[0]))
        buffers = Look.FORCE if self.ran_inside else Look.SKIP
        self._look(1, data=Look.FORCE, grad=Look.HINT, buffers=buffers, optimizer=Look.FORCE)
        if self._idle:
            return
        self._observer.looks.glance()
        if self._observer.capsules is not None:
            self._observer.capsules.update_ends()
        self.done += 1
        self._clock.update_ends(key_of(args[0]), tuple(self._inner))
        if self._observer.sleep is not None:
            if self.ran_inside:
                self._observer.sleep.refuse()
            self._observer.sleep.may_begin()

    def scaled_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._done_before = self.done

    def scaled_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """A loss scaler steps an optimizer, or skips it where gradients are not finite."""
        optimizer = args[1] if len(args) > 1 else (kwargs or {}).get("optimizer")
        if not raised and not self.depth and self.done == self._done_before and optimizer is not None:
            self._clock.update_ends(key_of(optimizer))

    def _optimizer_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self.depth:  # in a closure, or by an optimizer that clears at the end of its step: of this step
            self._clock.zero_grad(key_of(args[0]), self._observer.steps.by_hand.moved)
