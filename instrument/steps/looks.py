"""When state is looked at: at a boundary of a recorded step, at an update that a budget leaves out, when recording goes on, and at the end.

The observer has one. Hooks in `steps/` and `observe/structure.py` say that a boundary is there; what is read then is `observe/state.py`'s.
A look takes its turn (`turns.py`), so that no other thread writes what it reads, and no error of it reaches the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proctor.instrument.observe.state import Look
from proctor.instrument.steps.turns import Turns

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer


class Looks:
    """The looks of one process.

    Args:
        observer: says whether this process and step are recorded.

    Attributes:
        turns: of the threads that look and write.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.turns = Turns(self._threads_train)

    def look(
        self, edge: int, call: int | None = None, *,
        data: Look = Look.SKIP, grad: Look = Look.SKIP, buffers: Look = Look.SKIP, optimizer: Look = Look.SKIP, of: Sequence[int] | None = None,
    ) -> None:
        """Observe state at a boundary, if this step is recorded; `of`: of these parameters alone, by their ids."""
        observer = self._observer
        guard = observer.guard
        if not observer.sampled or not observer.writes() or "state" in guard.off:
            return
        recorder = observer.recorder
        where = recorder.current_call if call is None else call
        try:
            self.turns.look(observer.tracker.observe, recorder.current_seq, where, edge, self._context, data, grad, buffers, optimizer, False, of)
        except Exception as e:  # as `Guard.run`, which would be one call more in each of some ten looks of a step
            if not guard.takes("state", e):
                raise

    def glance(self) -> None:
        """After an update of a process with a budget, also in a step that it leaves out."""
        observer = self._observer
        sentinel = observer.sentinel
        if sentinel is None or not sentinel.due(observer.clock.step) or not observer.writes():
            return
        self.turns.look(observer.guard.run, "glance", sentinel.glance, observer.clock.step)

    def resume(self) -> None:
        """Steps were left out: what is now is what later changes are held against."""
        force = Look.FORCE
        self.turns.look(self._observer.tracker.observe, 0, 0, 0, self._context, force, force, force, force, True)

    def late(self) -> None:
        """The last one of the process."""
        self._observer.steps.by_hand.look()
        self.look(0, 0, data=Look.HINT, grad=Look.HINT)

    def _context(self) -> int:
        return self._observer.contexts.present(True)

    def _threads_train(self) -> None:
        self._observer.recorder.muted = True
        self._observer.guard.stop("two threads of this process train at once; their steps cannot be told apart, so nothing of it is judged")
