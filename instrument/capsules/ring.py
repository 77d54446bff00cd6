"""The last steps of a rank, kept in memory, so that one of them can be written down when something is found wrong with it.

Kept of a step: what the loaders gave, the inputs of outermost modules and loss functions, random states at the first act
and at each such call, parameters, gradients and buffers by fingerprint before and after, and all state, also that of optimizers, by
value where that fits the budgets; with it what models and loss functions gave, which a re-execution is compared with. Everything is a
copy; nothing of the user's is kept alive, changed, or drawn from.

Values cost a copy of the whole state, so `pace` says at which steps they are taken; `given` keeps what a step is given and gives.
The capsule of a step without values says what happened; the next step with values is then written beside it.

At least `capsules` steps stay; more where they fit the memory budget, up to `HORIZON_S`: a request takes its time.

`hooks` says when something of this happens. Freezing is asked for from any thread and done on a thread of its own (`writer`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic  # our own: a program may put another clock into `time`
from typing import Any, Final

from proctor.instrument.capsules.given import MAX_CALLS, Given
from proctor.instrument.capsules.hooks import CapsuleHooks
from proctor.instrument.capsules.pace import Pace
from proctor.instrument.capsules.state import StateValues, collect, gradients, names
from proctor.instrument.capsules.step import HeldStep, nbytes
from proctor.instrument.capsules.writer import PERIODIC, CapsuleWriter, Facts
from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.observe.seen import Seen
from proctor.instrument.observe.state import StateTracker
from proctor.instrument.steps.clock import StepClock

MAX_RING: Final = 128
HORIZON_S: Final = 3.0  # longer than the verifier needs to ask
IDLE_S: Final = 2.0  # after an update, until its step is taken to be over


class Capsules(CapsuleHooks):
    """The ring of one process.

    Args:
        config: `capsules` steps are kept, within `capsule_budget` bytes of memory.
        live: whether this step is recorded.
        facts: what a capsule says about the process.
        read: gradients of parameters (`Turns.gradients`).
    """

    def __init__(
        self,
        config: RecordConfig,
        tracker: StateTracker,
        clock: StepClock,
        guard: Guard,
        live: Callable[[], bool],
        facts: Callable[[], Facts],
        read: Callable[[Iterable[Any]], list[Any] | None],
    ) -> None:
        super().__init__(clock, guard, live)
        self.config, self.tracker, self._read = config, tracker, read
        self._optimizers_seen = config.watches("optimizer")  # by the tracker at each update
        self._steps = max(config.capsules, 1)
        self._room = config.capsule_budget // (2 * self._steps)  # bytes of a step's state, and half as many of its batches, and of its arguments
        self.pace, self.given = Pace(config.capsule_values), Given(self._room // 2)
        import torch

        self._grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self.ring: deque[HeldStep] = deque()  # changed and read under the writer's lock
        self._ring_bytes = 0
        self._spare: StateValues | None = None  # memory of a step that has left the ring: copies into it cost no page faults
        self._names: dict[Any, str] = {}
        self._named = -1  # layout of the tracker of which these are the names
        self.writer = CapsuleWriter(config, facts, guard, self._available)

    # -- what the verifier asks for ---------------------------------------------------------------------------

    def freeze(self, key: str, step: int) -> None:
        """Have a step written; from any thread, returns at once.

        Args:
            key: what it is for, the key of an incident; of one key few steps are written.
            step: may be the one that runs; one that left the ring is not written, which is said once.
        """
        self.writer.ask(key, step)

    @property
    def notes(self) -> list[str]:
        """What could not be written, for the trace."""
        return self.writer.notes

    def close(self) -> None:
        """The process ends: write what was asked for."""
        if self.current is not None:
            self._finish(self.current)
        self.writer.close()

    def took(self, seconds: float) -> None:
        """So long something of this took."""
        self.pace.spent += seconds

    # -- a step -----------------------------------------------------------------------------------------------

    def _step_opens(self) -> None:
        if self.current is not None:
            self._finish(self.current)
            self.pace.account(self.current)
            self.current = None
        step = HeldStep(self.clock.step)
        self.given.opens(step)
        self._before(step)
        self.current = step

    def _before(self, step: HeldStep) -> None:
        self.pace.opens(time.perf_counter())
        step.before = self._seen(whole=bool(self.config.replay))
        step.names = self._named_now()
        if self.pace.due(step):
            self._take_values(step)
        step.generators = self.given.generators.read()

    def _take_values(self, step: HeldStep) -> None:
        found, groups, missing = collect(self.tracker, self._live_scalers(), step.names)
        size = sum(tensor.nbytes for _, tensor in found if tensor is not None)
        if size > self._room and self.config.capsule_values != "always":
            step.why_not = f"the state has {size >> 10} KiB, the budget is {self._room >> 10} KiB a step"
            self.pace.over_budget = step.why_not
            return
        self.pace.over_budget = ""
        step.values = StateValues(found, groups, missing, self._spare)
        self._spare = None
        step.nbytes += size
        if any(tensor is not None and tensor.is_cuda for _, tensor in found):
            import torch

            step.event = torch.cuda.Event()
            step.event.record()

    def _batch(self, result: Any) -> None:
        self.given.batch(result, self.current, self._live() or self.looks_next())

    def _call(self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, opens: bool = False) -> None:
        if self.current is not None and self._grad_enabled():
            self.given.call(self.current, what, name, args, kwargs, opens)

    def _returned(self, what: str, result: Any) -> None:
        if self.current is not None and not self.current.skipped and self._grad_enabled():
            self.given.returned(self.current, what, result)

    def _backward(self, args: tuple[Any, ...]) -> None:
        step = self.current
        if step is None or len(step.calls) >= 2 * MAX_CALLS or not args:
            return
        if step.values is not None and step.gradients is None:
            self._take_gradients(step)
        self.given.backward(step, args)

    def _live_scalers(self) -> list[Any]:
        return [scaler for ref in self._scalers.values() if (scaler := ref()) is not None]

    def _finish(self, step: HeldStep) -> None:
        if step.complete:
            return
        if not step.updates:
            step.after = self._seen(whole=step.values is not None or bool(self.config.replay))
        step.nbytes += sum(nbytes(contents) for _, contents in step.batches) + self._room // 2 - step.room
        step.complete = True
        with self.writer.lock:
            self.ring.append(step)
            self._ring_bytes += step.nbytes
            self._forget()
        every = self.config.capsule_every
        if every and step.step % every == 0:
            self.writer.ask(PERIODIC, step.step)
        self.writer.step_is_there(step.step, self.given.first_batch)

    def _forget(self) -> None:
        """More steps than asked for stay where they fit: the verifier needs some time to ask, and steps may be fast."""
        now = monotonic()
        while len(self.ring) > self._steps:
            oldest = self.ring[0]
            fits = self._ring_bytes <= self.config.capsule_budget and len(self.ring) <= MAX_RING
            if fits and now - oldest.opened_at < HORIZON_S:
                break
            self.ring.popleft()
            self._ring_bytes -= oldest.nbytes
            if not oldest.frozen and oldest.values is not None:
                self._spare = oldest.values

    def _available(self) -> tuple[HeldStep, ...]:
        """Steps that can be written: those that are over, and the last one if the program is busy with something else."""
        last = self.current
        if last is None or last.complete or not last.updates or monotonic() - last.updated_at < IDLE_S:
            return tuple(self.ring)
        return (*self.ring, last)

    def _seen(self, *, whole: bool) -> Seen:
        """Fingerprints of what is tracked; of optimizers' state, which costs as much as all else, only where the whole is asked for."""
        if self._optimizers_seen:
            return self.tracker.seen_last()
        if whole:
            self.tracker.see_optimizers()
            return self.tracker.seen_last()
        return self.tracker.seen_last().without("optimizer")

    def _named_now(self) -> dict[Any, str]:
        """Names of what is tracked; made again when that may have changed."""
        if self.tracker.layout != self._named:
            self._names, self._named = names(self.tracker), self.tracker.layout
        return self._names

    def _take_gradients(self, step: HeldStep) -> None:
        found, missing = gradients(self.tracker, self._named_now(), self._read)
        size = sum(tensor.nbytes for _, tensor in found if tensor is not None)
        if step.nbytes + size > 2 * self._room and self.config.capsule_values != "always":
            found, missing = [], ["gradients before the first backward: over the budget"]
        step.gradients = StateValues(found, [], missing)
        step.nbytes += size

    def _updated(self) -> None:
        step = self.current
        if step is None:
            return
        step.after = self._seen(whole=step.values is not None or bool(self.config.replay))
        step.names = self._named_now()
        step.updates += 1
        step.updated_at = monotonic()

