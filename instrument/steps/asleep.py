"""Steps that a budget leaves out, without a hook in them: acts are noted by the taps themselves and counted behind each update.

A hook costs microseconds in the program's thread, cold ones several times that, and a step has dozens. So where the next look is some steps
away the recorder falls asleep (`native/calls/asleep.h`): taps note one byte an act, and behind an update the clock is told all of them in their
order. So steps have the same numbers as on a rank that is awake. Where updates come in a cycle (`cycles.py`) they are only counted, until
the next glance. One step before the next look everything is awake again.

What cannot be followed from acts alone keeps a process awake: models or backwards within an update (closures), updates within a backward,
training by hand. An act of another thread that trains ends the sleep.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from proctor.instrument.patch import catalog
from proctor.instrument.steps.cycles import Cycles, Update, replay
from proctor.instrument.steps.signs import key_of, moves_nothing
from proctor.invariants.schema import MODEL_CALL

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer

FORWARD, BACKWARD, UPDATE, CLEAR, CLEAR_MODULE, FETCH, SCALED, COLLECTIVE, QUIET = range(1, 10)  # `Act` in native/calls/asleep.h
_UPDATED, _SKIPPED, _FOREIGN, _PASSED = range(4)  # `Told`
_SHORTEST: Final = 3  # steps that are worth falling asleep for
_TIMED: Final = 8  # one tick in so many is timed
_ACT_S: Final = 2e-7  # what an act costs natively, cold

_ACTS: Final = {
    "torch.Tensor.backward": BACKWARD, "torch.autograd.backward": BACKWARD, "torch.optim.Optimizer.step": UPDATE,
    "torch.optim.Optimizer.zero_grad": CLEAR, "torch.nn.Module.zero_grad": CLEAR_MODULE, "torch.utils.data.DataLoader.__next__": FETCH,
    "torch.amp.GradScaler.step": SCALED, MODEL_CALL: FORWARD, "torch.nn.Module.__call__": FORWARD, "torch.amp.GradScaler.scale": QUIET,
}  # fmt: skip
_PAIRS: Final = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # have no group of their own count


def act_of(function: str) -> int:
    """What a function is to a training loop; 0: its hooks run in all steps."""
    name = function.rpartition(".")[2]
    if function in catalog.COLLECTIVES and name not in _PAIRS and not name.endswith(("_group", "_coalesced")):
        return COLLECTIVE
    return _ACTS.get(function, 0)


class Sleep:
    """The sleep of one process.

    Args:
        observer: whose clock is told, and whose budget says until when.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer, self._clock, self._updates = observer, observer.clock, observer.steps.updates
        self.on = False
        self.possible = True  # so far
        self.ticks = 0
        self._spent = 0.0  # seconds, as far as was timed
        self._timed = 0
        self._acts = 0
        self._begun = 0  # the step that ran when it began
        self._until = 0  # the step before which it ends
        self._odd = False  # something was noted that cannot be followed
        self._cycles = Cycles(self._clock)
        self._keys: dict[int, int] = {}  # what the clock calls an optimizer, by its id
        self._inner: list[int] = []
        self._teller = observer.patches.aside(self._told)

    def knows(self, optimizer: Any) -> None:
        """An optimizer was made, or has other parameters: everything is awake, and what it did before says nothing."""
        self.end()
        self._cycles.forget()
        self._keys[id(optimizer)] = key_of(optimizer)

    def refuse(self) -> None:
        """This program does what cannot be followed asleep."""
        self.possible = False

    def may_begin(self) -> None:
        """Behind an update of a step that is left out."""
        observer, budget = self._observer, self._observer.budget
        if self.on or not self.possible or budget is None or observer.sentinel is None or observer.sampled or not observer.armed:
            return
        if observer.steps.in_backward or self._updates.depth or observer.turns.busy() or observer.inert or observer.finished or observer.config.replay:
            return
        step = self._clock.step
        until = budget.next_look(step + 1)
        if until - step < _SHORTEST or not observer.recorder.sleep(self._teller):
            return
        self.on, self._begun, self._until, self._odd = True, step, until, False
        self._spent, self._timed, self._acts, self.ticks = 0.0, 0, 0, 0
        self._clock.on_new_step, self._clock.on_change = self._counted, None
        budget.falls_asleep()
        self._cycles.broken()
        self._expect()

    def end(self) -> bool:
        """Everything is awake from now on; what was noted and not yet told is told.

        Returns:
            whether a backward or an update runs.
        """
        if not self.on:
            return False
        observer, budget = self._observer, self._observer.budget
        self.on = False
        acts, who, backwards, collectives, running, passed = observer.recorder.wake()
        self._pass(passed)
        self._replay(acts, tuple(map(self._keys.get, who)))
        self._clock.on_new_step, self._clock.on_change = observer.new_step, observer.clock_moved
        self._clock.on_change()
        observer.tracker.dirty = True
        observer.probes.slept(backwards, collectives)
        if self._odd:
            self.refuse()
        if budget is not None:
            mean = self._spent / self._timed if self._timed else 0.0
            budget.wakes_up(self._clock.step - self._begun, self.ticks * mean + self._acts * _ACT_S)
        return running > 0

    # -- what the recorder tells ------------------------------------------------------------------------------

    def _told(self, args: tuple[Any, ...], acts: str, who: tuple[int, ...], kind: int, passed: int) -> None:
        timed = self.ticks % _TIMED == 0
        begin = time.thread_time() if timed else 0.0
        self.ticks += 1
        if self._observer.guard.run("sleep", self._tick, args, acts, who, kind, passed) is None:
            self.possible = False
            self.end()
        if timed:
            self._spent += time.thread_time() - begin
            self._timed += 1

    def _tick(self, args: tuple[Any, ...], acts: str, who: tuple[int, ...], kind: int, passed: int) -> bool:
        if self._observer.inert or self._observer.finished:
            return True
        clock = self._clock
        self._pass(passed)
        if kind == _PASSED:
            self._observer.looks.glance()
            return self._go_on()
        before, keys = clock.step, tuple(map(self._keys.get, who))
        self._replay(acts, keys)
        if kind == _FOREIGN:
            if self.end():
                self._observer.turns.seen_running()
            return True
        optimizer = args[0 if kind == _UPDATED else 1] if len(args) > (kind != _UPDATED) else None
        if optimizer is None:
            self._odd = True
        elif kind == _SKIPPED:
            clock.update_ends(key_of(optimizer))
            self._cycles.broken()
        elif self._update(optimizer):
            self._cycles.told(Update(acts, who, keys, id(optimizer), self._keys[id(optimizer)]), clock.step - before)
        else:
            self._cycles.broken()
        return self._go_on()

    def _go_on(self) -> bool:
        """Sleep on, until when, or wake."""
        observer, step = self._observer, self._clock.step
        if self._odd or step + 1 >= self._until or observer.budget is None or observer.budget.woken or not observer.recorder.asleep:
            self.end()
        else:
            self._expect()
        return True

    def _expect(self) -> None:
        """Say which updates need not be told until the next glance."""
        observer, step = self._observer, self._clock.step
        observer.recorder.expect(*self._cycles.expected(min(self._until - 1, observer.sentinel.next_due(step)) - step))  # type: ignore[union-attr]
        if observer.budget is not None and observer.budget.woken:  # meanwhile, by another thread
            self.hurry()

    def _pass(self, updates: int) -> None:
        """So many updates went by as expected."""
        steps, acts = self._cycles.passed(updates)
        self._acts += acts
        self._updates.done += updates
        if steps and self._observer.budget is not None:
            self._observer.budget.passes(self._clock.step, steps)
            self._observer.writer.passed(self._clock.step)

    def hurry(self) -> None:
        """Something is wrong: tell of the next update, whatever it is like. From any thread."""
        if self.on:
            self._observer.recorder.expect((), 0)

    def _update(self, optimizer: Any) -> bool:
        """Returns: whether it is one that a cycle may have."""
        if (key := self._keys.get(id(optimizer))) is None:
            key = self._keys[id(optimizer)] = key_of(optimizer)
        clock = self._clock
        rests = clock.at_rest(key)
        if rests and moves_nothing(optimizer):
            return False
        clock.update_begins(key)
        self._observer.looks.glance()
        self._updates.done += 1
        clock.update_ends(key, tuple(self._inner))
        self._inner.clear()
        return not rests

    def _replay(self, acts: str, keys: tuple[int | None, ...]) -> None:
        plain, inner = replay(self._clock, acts, keys)
        self._acts += len(acts)
        self._odd |= not plain
        self._inner += inner

    def _counted(self) -> None:
        """The clock is about to count a new step, in which nothing is looked at."""
        budget = self._observer.budget
        if budget is not None:
            budget.passes(self._clock.step + 1)
        self._observer.writer.passed(self._clock.step + 1)
