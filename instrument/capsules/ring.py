"""The last steps of a rank, kept in memory, so that one of them can be written down when something is found wrong with it.

Kept of a step: what the loaders gave, the inputs of outermost modules and loss functions, random states at the first act
and at each such call, parameters, gradients and buffers by fingerprint before and after, and all state, also that of optimizers, by
value where that fits the budgets; with it what models and loss functions gave, which a re-execution is compared with. Everything is a
copy; nothing of the user's is kept alive, changed, or drawn from.

Values cost a copy of the whole state. "auto" takes them at every n-th step, n the smallest power of two at which all that
is done here takes at most a hundredth of the time, or the copies a quarter of that where the rest leaves them less (a power of
two, so that ranks of different speed share steps). The capsule of a step without values says what happened; the next step
with values is then written beside it.

At least `capsules` steps stay; more where they fit the memory budget, up to `HORIZON_S`: a request takes its time.

Freezing is asked for from any thread and done on a thread of its own (`_capsule_writer`).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from proctor.instrument.capsules.held import Holder, is_plain, leaves
from proctor.instrument.capsules.rng import OF_PROGRAM, Reader, has_cuda
from proctor.instrument.capsules.state import StateValues, collect, gradients, names
from proctor.instrument.capsules.step import Content, HeldCall, HeldStep, nbytes
from proctor.instrument.capsules.writer import PERIODIC, CapsuleWriter, Facts
from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard
from proctor.instrument.observe.seen import Seen
from proctor.instrument.observe.state import StateTracker
from proctor.instrument.patch.patches import Hooks
from proctor.instrument.steps.clock import StepClock

NEXT: Final = "torch.utils.data.DataLoader.__next__"
SCALE: Final = "torch.amp.GradScaler.scale"
MAX_CALLS: Final = 64  # of a step
MAX_BATCHES: Final = 64  # between two steps
AHEAD: Final = 4  # batches loaded before a step that it may use: some loops load ahead
SHARE: Final = 0.01  # of the time, that all of this may take
LEAST: Final = 0.25  # of that, which copies of the state may take however much the rest does
MAX_INTERVAL: Final = 4096  # steps from one copy of the state to the next
LOOK_AGAIN: Final = 64  # steps after which a state that was too large is measured again
MAX_RING: Final = 128
HORIZON_S: Final = 3.0  # longer than the verifier needs to ask
IDLE_S: Final = 2.0  # after an update, until its step is taken to be over


class Capsules:
    """The ring of one process, and the hooks that fill it.

    Args:
        config: `capsules` steps are kept, within `capsule_budget` bytes of memory.
        live: whether this step is recorded.
        facts: what a capsule says about the process.
    """

    def __init__(
        self,
        config: RecordConfig,
        tracker: StateTracker,
        clock: StepClock,
        guard: Guard,
        live: Callable[[], bool],
        facts: Callable[[], Facts],
    ) -> None:
        self.config, self.tracker, self.clock, self.guard = config, tracker, clock, guard
        self._live = live
        self._optimizers_seen = config.watches("optimizer")  # by the tracker at each update
        self._steps = max(config.capsules, 1)
        self._room = config.capsule_budget // (2 * self._steps)  # bytes of a step's state, and half as many …
        import torch

        # Looked up once: in a step every object that is touched costs a cache miss.
        self._cuda: Any = torch.cuda if has_cuda() else None
        self._plainly: Any = torch._C.DisableTorchFunction
        self._grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self.current: HeldStep | None = None
        self.ring: deque[HeldStep] = deque()  # changed and read under the writer's lock
        self._holder = Holder()
        self._generators = Reader()
        self._loaded = 0  # batches so far
        self._first_batch: int | None = None
        self._batches: list[tuple[int, list[Content]]] = []
        self._batch_room = self._room // 2  # … of the batches, and of the arguments
        self._seen_step = -1
        self._depth = 0  # calls of interest that contain each other
        self._scalers: dict[int, weakref.ref[Any]] = {}
        self._ring_bytes = 0
        self._over_budget = self._too_dear = ""  # why no state is copied
        self._interval, self._period, self._opened_at = 1, 0.0, 0.0
        self._spent = 0.0  # s of this step, in here
        self._bare, self._whole = 0.0, 0.0  # s of a step without and with values
        self._spare: StateValues | None = None  # memory of a step that has left the ring
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

    # -- hooks ------------------------------------------------------------------------------------------------

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
        if self._depth == 0 and not self._only_inputs():
            self._run(self._returned, "module", result)

    def _only_inputs(self) -> bool:
        """Whether what the calls of this step give is left out."""
        return self.current is not None and self.current.skipped

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
            if self._depth == 0 and not self._only_inputs():
                self._run(self._returned, "loss", result)

        return before, after

    def _loads(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._run(self._batch, result, always=True)

    def _scales(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if id(args[0]) not in self._scalers:
            self._scalers[id(args[0])] = weakref.ref(args[0])

    def _run(self, what: Callable[..., None], *args: Any, always: bool = False) -> None:
        if not (always or self._live()) or (self._cuda is not None and self._captures()):
            return
        started = time.perf_counter()
        with self._plainly():  # reading an attribute of a tensor must not run a mode of the user's
            self.guard.run("capsules", what, *args)
        self._spent += time.perf_counter() - started

    def _captures(self) -> bool:
        """Whether a graph is being captured, which is left alone."""
        return bool(self._cuda.is_initialized() and self._cuda.is_current_stream_capturing())

    # -- a step -----------------------------------------------------------------------------------------------

    def _step_opens(self) -> None:
        if self.current is not None:
            self._finish(self.current)
            self._account(self.current)
            self.current = None
        step = HeldStep(self.clock.step)
        if self._first_batch is None:
            self._first_batch = self._loaded
        step.batches_before, step.room = self._loaded, self._room // 2
        step.batches = [b for b in self._batches if b[0] >= self._loaded - AHEAD]
        self._batches = list(step.batches)
        self._batch_room = self._room // 2
        self._holder.clear()
        self._before(step)
        self.current = step

    def _before(self, step: HeldStep) -> None:
        started = time.perf_counter()
        if self._opened_at:
            self._period = _mean(self._period, started - self._opened_at)
        self._opened_at = started
        step.before = self._seen(whole=bool(self.config.replay))
        step.names = self._named_now()
        if self._takes_values(step):
            self._take_values(step)
        step.generators = self._generators.read()

    def _takes_values(self, step: HeldStep) -> bool:
        mode = self.config.capsule_values
        if mode == "always" or (mode == "auto" and not self._over_budget and not step.step % self._interval):
            return True
        if mode == "never":
            step.why_not = "values are not kept (capsule_values = never)"
        elif not self._over_budget:
            step.why_not, step.skipped = self._too_dear, True
        elif step.step % LOOK_AGAIN:
            step.why_not = self._over_budget
        else:
            return True
        return False

    def _take_values(self, step: HeldStep) -> None:
        found, groups, missing = collect(self.tracker, self._live_scalers(), step.names)
        size = sum(tensor.nbytes for _, tensor in found if tensor is not None)
        if size > self._room and self.config.capsule_values != "always":
            step.why_not = f"the state has {size >> 10} KiB, the budget is {self._room >> 10} KiB a step"
            self._over_budget = step.why_not
            return
        self._over_budget = ""
        step.values = StateValues(found, groups, missing, self._memory())
        step.nbytes += size
        if any(tensor is not None and tensor.is_cuda for _, tensor in found):
            import torch

            step.event = torch.cuda.Event()
            step.event.record()

    def _memory(self) -> StateValues | None:
        """Of a step that has left the ring: copies into it cost no page faults."""
        spare, self._spare = self._spare, None
        return spare

    def _account(self, step: HeldStep) -> None:
        """Learn from what a step took, other than the first of all: it imports."""
        spent, self._spent = self._spent, 0.0
        if step.step == 0:
            return
        if step.values is None:
            self._bare = _lately(self._bare, spent)
        else:
            self._whole = _lately(self._whole, spent)
        self._adapt()

    def _adapt(self) -> None:
        if self._period <= 0 or self.config.capsule_values == "always":
            return
        share, cost, interval = SHARE * self._period, self._whole - self._bare, 1
        allowed = max(share - self._bare, LEAST * share)
        while interval < MAX_INTERVAL and cost > interval * allowed:
            interval *= 2
        if interval != self._interval:
            self._interval = interval
            self._too_dear = f"values are kept at every {interval}th step: a copy takes {1e3 * cost:.1f} ms"

    def _live_scalers(self) -> list[Any]:
        return [scaler for ref in self._scalers.values() if (scaler := ref()) is not None]

    def _finish(self, step: HeldStep) -> None:
        if step.complete:
            return
        if not step.updates:
            step.after = self._seen(whole=self._is_whole(step))
        step.nbytes += sum(nbytes(contents) for _, contents in step.batches) + self._room // 2 - step.room
        step.complete = True
        with self.writer.lock:
            self.ring.append(step)
            self._ring_bytes += step.nbytes
            self._forget()
        every = self.config.capsule_every
        if every and step.step % every == 0:
            self.writer.ask(PERIODIC, step.step)
        self.writer.step_is_there(step.step, self.first_batch)

    def _forget(self) -> None:
        """More steps than asked for stay where they fit: the verifier needs some time to ask, and steps may be fast."""
        now = time.monotonic()
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
        if last is None or last.complete or not last.updates or time.monotonic() - last.updated_at < IDLE_S:
            return tuple(self.ring)
        return (*self.ring, last)

    def _is_whole(self, step: HeldStep) -> bool:
        return step.values is not None or bool(self.config.replay)

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

    @property
    def first_batch(self) -> int:
        """Batches that were loaded before the first training act."""
        return self._first_batch or 0

    def _batch(self, result: Any) -> None:
        number, self._loaded = self._loaded, self._loaded + 1
        contents = self._contents(leaves(result), self._batch_room)
        self._batch_room -= nbytes(contents)
        self._batches = [*self._batches[-MAX_BATCHES + 1 :], (number, contents)]
        if len(self._batches) > AHEAD and (self.current is None or self.current.updates):
            # Between steps only those that the next one may use; their room is free again.
            self._batch_room += sum(nbytes(c) for _, c in self._batches[:-AHEAD])
            self._batches = self._batches[-AHEAD:]
        if self.current is not None and not self.current.updates:
            self.current.batches = [*self.current.batches[-MAX_BATCHES + 1 :], (number, contents)]

    def _call(
        self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, opens: bool = False
    ) -> None:
        step = self.current
        if step is None or not self._grad_enabled():
            return
        if len(step.calls) >= MAX_CALLS:
            step.lacks(f"more than {MAX_CALLS} calls: the later ones")
            return
        inputs = self._contents(leaves((*args, kwargs), names=True), step.room)
        step.room -= nbytes(inputs)
        drawn = [s for s in step.generators if s.name not in OF_PROGRAM] if opens else self._generators.read(everything=False)
        step.calls.append(HeldCall(what, name, inputs, drawn))

    def _returned(self, what: str, result: Any) -> None:
        step = self.current
        if step is None or not step.calls or not self._grad_enabled():
            return
        call = step.calls[-1]
        if call.what == what and not call.outputs:
            call.outputs = [(p, self._holder.observe(v) if hasattr(v, "data_ptr") else v) for p, v in leaves(result)[:32]]

    def _backward(self, args: tuple[Any, ...]) -> None:
        step = self.current
        if step is None or len(step.calls) >= 2 * MAX_CALLS or not args:
            return
        if step.values is not None and step.gradients is None:
            self._take_gradients(step)
        call = HeldCall("backward", "", [], [])
        if not self._only_inputs():
            call.outputs = [(p, self._holder.observe(v)) for p, v in leaves(args[0])[:8] if hasattr(v, "data_ptr")]
        step.calls.append(call)

    def _take_gradients(self, step: HeldStep) -> None:
        found, missing = gradients(self.tracker, self._named_now())
        size = sum(tensor.nbytes for _, tensor in found if tensor is not None)
        if step.nbytes + size > 2 * self._room and self.config.capsule_values != "always":
            found, missing = [], ["gradients before the first backward: over the budget"]
        step.gradients = StateValues(found, [], missing)
        step.nbytes += size

    def _updated(self) -> None:
        step = self.current
        if step is None:
            return
        step.after = self._seen(whole=self._is_whole(step))
        step.names = self._named_now()
        step.updates += 1
        step.updated_at = time.monotonic()

    def _contents(self, found: list[tuple[str, Any]], room: int) -> list[Content]:
        contents: list[Content] = []
        for place, leaf in found:
            if hasattr(leaf, "data_ptr"):
                held = self._holder.hold(leaf, room)
                room -= held.nbytes
                contents.append((place, held))
            else:
                contents.append((place, leaf if is_plain(leaf) else f"<{type(leaf).__name__}>"))
        return contents


def _lately(old: float, new: float) -> float:
    """A mean in which less counts at once: what is more than the work itself is that somebody else had the processor."""
    return new if new < old else _mean(old, new)


def _mean(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new
