"""Training without an optimizer of torch: an update is that parameters have other values than at the backward before.

`acts` asks before each forward, backward and clearing. What is trained are the leaves of the graph of a backward (`leaves`);
the process is recorded from the first update that they show.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from proctor.instrument.observe.state import Look
from proctor.instrument.steps.leaves import Lineage, leaves_of
from proctor.instrument.steps.rounds import BY_HAND
from proctor.instrument.steps.updates import Updates

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

KEPT_MODELS = 64  # that are remembered until a process is armed
LEAF_LOOKS = 64  # backwards below which leaves are looked for


class ByHand:
    """What one process trains by hand.

    Args:
        observer: whose clock is told, and which looks at state.
        updates: of optimizers; where there are some, nothing is trained by hand.
    """

    def __init__(self, observer: Observer, updates: Updates) -> None:
        self._observer, self._updates = observer, updates
        self._clock, self._guard = observer.clock, observer.guard
        self._called: dict[int, weakref.ref[Any]] = {}  # outermost models that trained before this process was armed
        self.looks = 0
        self._lineage = Lineage()

    def called(self, model: Any) -> None:
        """An outermost model is called for training, before this process is armed."""
        if len(self._called) < KEPT_MODELS:
            self._called[id(model)] = weakref.ref(model)

    def applies(self) -> bool:
        """Whether there is no optimizer of torch."""
        return not self._updates.optimizers and not self._observer.inert and not self._updates.depth

    def find(self, args: tuple[Any, ...]) -> bool:
        """Before a backward in a program that has no optimizer: what it may train are the leaves of its graph.

        Returns:
            whether they are new tensors that took the place of those of the backward before.
        """
        if self.looks >= LEAF_LOOKS and not self._lineage.followed:
            return False
        return self.trains(leaves_of(args))

    def trains(self, leaves: list[tuple[str, Any]]) -> bool:
        """Track what is differentiated by; whether it took the place of what was."""
        self.looks += 1
        for ref in self._called.values():
            model = ref()
            if model is not None and not self._observer.tracker.knows(model):
                self._observer.tracker.add_model(model)
        self._called.clear()
        gone = self._lineage.follow(leaves)
        self._observer.tracker.forget(gone)
        self._observer.tracker.add_leaves(leaves)
        return bool(gone)

    def look(self, backward: bool = False, replaced: bool = False) -> None:
        """Where there is no optimizer, an update is that parameters have another value than at the backward before. Where there are some, and none has stepped, parameters are read.

        Args:
            backward: one begins now.
            replaced: it is of new tensors that took the place of those of the backward before.
        """
        pending = self._clock.backward_pending
        if pending and self._updates.optimizers and not self._updates.done and not self._updates.depth and self._observer.armed and self._observer.sampled:
            self._observer.look(0, data=Look.FORCE)  # none has stepped: what was written past version counters is of this step
        if not (pending or backward) or not self.applies():
            return
        if not self._observer.armed and self.looks >= LEAF_LOOKS:
            return  # it asks for gradients and trains nothing
        if (self._guard.run("state", self._observer.tracker.moved) or replaced) and pending:
            self._observer.arm("parameters were updated by hand")
            self._observer.look(0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)
            self._updates.done += 1
            self._clock.update_ends(BY_HAND)

    def moved(self) -> bool:
        """Whether parameters were written since the last backward, before any update: by hand, for another backward. Of a step that is left out nobody knows."""
        return self._observer.armed and self._observer.sampled and self._observer.tracker.watches("data") and self._observer.tracker.wrote_data()
