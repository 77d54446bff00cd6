"""The observer of a process: dormant after `import torch`, armed by the first training act, inert in helpers.

It owns the recorder, the patches, the clock, the tracker and the writer. Its hooks are in `steps.py` (step, phase, state) and
`structure.py` (ranks, groups, meshes); `taps.py` says which functions they hang on.

Tripwires: the first `Optimizer.__init__`, the end of `init_process_group`, or parameters that change after a backward in a program without an optimizer. What happens before (seeding,
construction, initialisation) waits in the recorder's buffer and is written when the process arms. The rule gives
exactly the training processes of every launcher that was tried (findings/ecosystem.md §1.2).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

from proctor.errors import ProctorError
from proctor.instrument._guard import Guard, say, unsaid
from proctor.instrument._packages import packages
from proctor.instrument._sentinel import Sentinel
from proctor.instrument._turns import Turns
from proctor.instrument.budget import make_budget
from proctor.instrument.config import RecordConfig
from proctor.instrument.context import ContextTable, StepClock
from proctor.instrument.patches import Patches
from proctor.instrument.probes import MAX_VALUES, Probes, Sink, _workers
from proctor.instrument.state import Look, StateTracker
from proctor.instrument.steps import PRE_ARM_ROWS, Steps
from proctor.instrument.structure import Structure
from proctor.instrument.taps import Taps
from proctor.instrument.usercode import UserCode, library_prefixes
from proctor.invariants.schema import MODEL_CALL, TRACE_SCHEMA, Name, Value
from proctor.native import Recorder

MAX_ROWS = 4_000_000  # records in memory when the writer cannot keep up
MAX_UNSEEN = 2_000  # names of functions that are told not to be observed
HOT_CALLS = 20_000  # calls of one user function between two flushes that take it out of the trace
ROOTS_ONLY = 1 << 31  # in a code of `module_namer`: wanted as the outermost module only


class Observer:
    """Everything that watches one process."""

    def __init__(self, config: RecordConfig) -> None:
        self.config = config
        self.guard = Guard()
        self.recorder = Recorder()
        self.budget = make_budget(config, self._threads)
        self.patches = Patches(self.recorder, None if self.budget is None else self.budget.meter.around)
        self.clock = StepClock()
        self.contexts = ContextTable(self.clock)
        self.sink = Sink(self.recorder, self._value_ctx, config, self._wants_values)
        self.probes = Probes(self.sink, self.guard.run)
        self.guard.step, self.guard.on_end = lambda: self.clock.step, self._went_blind
        self.guard.ends |= self.probes.ends()
        self.user = UserCode(self.patches, library_prefixes(), self._wants_user, self.probes)
        self.armed = False
        self.inert = False
        self.finished = False
        self.unseen: list[str] = []  # functions that can be called past their taps
        self.makes_run = False  # no command made the run directory: arming does
        self._notes: list[str] = []
        self._early_drops = 0
        self._early_values = 0
        self.sampled = True
        self.turns = Turns(self._threads_train)
        self._arming = threading.Lock()
        self._sample_every = config.every
        self.writer: Any = None
        self.tracker: Any = None
        self.capsules: Any = None
        self.sentinel: Sentinel | None = None
        self.steps = Steps(self)
        self.structure = Structure(self)
        self.taps = Taps(self)

    def install(self) -> None:
        """Tap everything that the configuration asks for. The recorder fills a bounded buffer until `arm`."""
        import torch
        from torch import nn

        self.tracker = StateTracker(self._intern, self._watches)
        self.tracker.on_names = self.recorder.set_tracked_names
        self.sentinel = Sentinel(self.tracker, self.budget) if self.budget is not None and self.budget.share else None
        self.guard.run("capsules", self._make_capsules)
        recorder = self.recorder
        recorder.capacity = PRE_ARM_ROWS
        recorder.set_tensor_types(torch.Tensor, nn.Parameter)
        recorder.set_module_type(nn.Module)
        recorder.set_library_prefixes(library_prefixes())
        # Not `cuda.is_available()`: asking the driver here would spoil CUDA for children that the program forks.
        devices = ("cpu", "cuda") if torch.version.cuda is not None else ("cpu",)
        anywhere = getattr(torch._C, "_is_any_autocast_enabled", None)  # one call instead of one a device type
        recorder.set_probes(
            torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype, devices, anywhere
        )
        # Reading a tensor's attributes must not run the user's TorchFunctionMode.
        recorder.set_torch_function_guard(torch._C._len_torch_function_stack, torch._C.DisableTorchFunction)
        recorder.set_context_resolver(self.contexts.resolve)
        recorder.module_namer = self._module_code
        recorder.on_error = lambda error: self.guard.report("hook", error)
        self.clock.on_change = self.clock_moved
        self.clock.on_new_step = self._new_step
        self.taps.lay()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)
        recorder.enabled = True

    def _watches(self, attr: str) -> bool:
        kept = self.config.capsules > 0 or bool(self.config.replay)
        return self.config.watches(attr) or (kept and attr != "optimizer")  # capsules look at that themselves

    def _make_capsules(self) -> None:
        if not self.config.capsules and not self.config.replay:
            return
        kind: Any
        if self.config.replay:
            from proctor.instrument._replayer import Replayer as kind
        else:
            from proctor.instrument.capsules import Capsules as kind
        self.capsules = kind(self.config, self.tracker, self.clock, self.guard, self._keeps_steps, self._about)

    def _keeps_steps(self) -> bool:
        return self.armed and self.sampled and not self.inert and not self.finished and not self.contexts.recompute and not self.turns.broken

    def _about(self) -> Any:
        from proctor.instrument._capsule_writer import facts

        return facts(self.config, self._info())

    # -- life ---------------------------------------------------------------------------------------------

    def reach_early(self) -> None:
        """Make up for coming after the program's imports: its own names for our functions, and its own functions."""
        self.unseen.extend(self.patches.reach_names())
        self.user.sweep()

    def arm(self, reason: str) -> None:
        """Begin to write: this process trains."""
        if self.armed or self.inert or self.finished or not self._arming.acquire(blocking=False):
            return  # two threads may make their first optimizers at once
        from proctor.instrument.writer import TraceWriter

        if self.makes_run:
            from proctor.instrument.rundir import create_run

            try:
                create_run(Path(self.config.run), sys.argv or ["python"], overwrite=False, shared=True)
            except ProctorError as e:
                self.become_inert()
                say(f"not recording: {e}")
                return
        self.armed = True
        rank = self.structure.find_coords()
        folder = Path(self.config.run) / "procs" / f"{rank}-{os.getpid()}"
        try:
            self.writer = TraceWriter(
                folder, self._drain, self._info, self._degrade, self.guard, self._sender(folder)
            )
        except OSError as e:
            self.become_inert()
            say(f"not recording: {folder}: {e.strerror or e}")
            return
        self._early_drops, self._early_values = self.recorder.dropped, self.sink.dropped
        self.recorder.capacity, self.sink.capacity = MAX_ROWS, MAX_VALUES
        self.user.sweep()
        self.recorder.enabled = True
        self.writer.start()
        if rank == 0:
            say(f"recording to {self.config.run} ({reason})")

    def _sender(self, folder: Path) -> Any:
        """The way to the verifier, where there is one."""
        if not self.config.stream:
            return None
        import platform

        from proctor.instrument.stream import Sender

        token = Path(self.config.token_file or Path(self.config.run) / "boot" / "token")
        try:
            return Sender(
                self.config.stream,
                token,
                lambda: (folder.name, platform.node(), self.writer.told(self._info())),
                self.guard,
                on_freeze=self._freeze,
            )
        except (ProctorError, OSError) as e:
            say(f"not streaming: {e}")
            return None

    def _freeze(self, key: str, step: int) -> None:
        """The verifier has found something: the step is kept, and what comes is looked at in full."""
        if self.capsules is not None:
            self.capsules.freeze(key, step)
        if self.budget is not None:
            self.budget.wake()

    def _threads(self) -> list[threading.Thread]:
        return self.writer.threads if self.writer is not None else []

    def close(self, leaving: bool = False) -> None:
        """Flush, say goodbye and put every function back. Called at exit."""
        if self.finished:
            return
        if self.armed and not self.inert:
            self.guard.run("last-look", self._look_late)
            self.probes.closing()
            if self.capsules is not None:
                self.guard.run("capsules", self.capsules.close)
            self.finished = True
            self.recorder.enabled = False
            self.writer.close()
        elif not self.finished and os.getpid() == self.config.command:
            self._say_nothing()
        self.finished = True
        self.recorder.enabled = False
        if not leaving:
            self.patches.remove()

    def _say_nothing(self) -> None:
        """The command ends, and neither it nor a process that it started has recorded anything."""
        recorded = Path(self.config.run) / "procs"
        if not recorded.is_dir() or not any(recorded.iterdir()):
            say("nothing was recorded: no optimizer of torch was made, and no parameter was seen to change after a backward")

    def pause(self, paused: bool) -> None:
        """Stop or resume observing without removing anything; for benchmarks. Steps meanwhile are not counted."""
        self.sampled = not paused
        self.recorder.enabled = not paused
        self.taps.always(not paused)

    def _forked(self) -> None:
        """In a forked child: a child of a training process is a helper; a child of a launcher may yet train."""
        self.recorder.disable_in_child()
        if self.armed:
            self.become_inert()
        else:
            self.recorder.enabled = True

    def become_inert(self) -> None:
        """This process does not train: observe nothing more."""
        self.inert = True
        self.recorder.enabled = False
        self.taps.always(False)

    def loader_worker(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """This process loads data for another."""
        self.become_inert()
        if self.config.keeps(Value.RNG) and self.config.wants("torch.utils.data.DataLoader.__iter__"):
            self.guard.run("loader worker", _workers.observe, self.config.run)

    def _drain(self) -> dict[str, Any]:
        calls, states, values = self.recorder.drain(), self.tracker.take_rows(), self.sink.take_rows()
        # Taken after the rows, because the program goes on meanwhile: what a row refers to is then among them.
        context, names = self.contexts.take_rows(), self.recorder.drain_names()
        self._cool(calls)
        return {"names": names, "context": context, "calls": calls, "states": states, "values": values}

    def _cool(self, calls: dict[str, Any]) -> None:
        """Stop observing a user function that is called so often that it drowns the rest."""
        import numpy as np

        fn = np.asarray(calls["fn"])
        if len(fn) < HOT_CALLS:
            return
        codes, counts = np.unique(fn, return_counts=True)
        hot = {int(c) for c, n in zip(codes, counts) if n >= HOT_CALLS}
        for name in list(self.user.names):
            if self._intern(Name.FUNCTION, name) in hot and self.user.drop(name):
                self.unseen.append(name)
                self._notes.append(f"{name} is called too often; no longer observed")

    def _info(self) -> dict[str, Any]:
        import torch

        return {
            "schema": TRACE_SCHEMA,
            "pid": os.getpid(),
            **self.structure.facts(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "libraries": {
                name: str(getattr(sys.modules[name], "__version__", "")) for name in self.taps.libraries if name in sys.modules
            },
            "dropped": self.recorder.dropped - self._early_drops + self.sink.dropped - self._early_values
            + (self.writer.lost + self.writer.torn if self.writer is not None else 0),
            "notes": self.guard.notes + self._notes + unsaid() + (self.capsules.notes if self.capsules is not None else []),
            "finished": self.finished,
            "blind": [list(pair) for pair in self.guard.ended],
            "unobserved": [*self.unseen, *self.user.left_alone][:MAX_UNSEEN],
            "definitions": dict(self.user.definitions),
            "packages": packages(),
            **(self.budget.facts(last=self.finished) if self.budget is not None else {}),
            **self.probes.facts(),
        }

    def _went_blind(self) -> None:
        if self.writer is not None:
            self.writer.tell_soon()

    def _degrade(self, failing: bool) -> None:
        """The disk is full: sample ever more sparsely; back to normal when it is not."""
        self._sample_every = min(max(self._sample_every, 1) * 10, 10_000) if failing else self.config.every
        if failing:
            self._notes.append("the trace could not be written for a while; steps were sampled")

    # -- names and contexts -------------------------------------------------------------------------------

    def _intern(self, kind: int, text: str) -> int:
        return int(self.recorder.intern(int(kind), text))

    def name(self, thing: Any, label: str) -> None:
        """What signatures call this object."""
        self.tracker.names[id(thing)] = label
        self.recorder.track(id(thing), label)

    def _wants_user(self, name: str) -> bool:
        return self.config.user_code if not self.config.selective else self.config.wants(name)

    def _module_code(self, cls: type) -> int:
        place = cls.__module__ or ""
        if place.startswith("torch.nn.modules."):
            name = f"torch.nn.{cls.__qualname__}.forward"
        elif place == "torch.nn.parallel.distributed":
            name = "torch.nn.parallel.DistributedDataParallel.forward"
        else:
            name = f"{'__main__' if place == '__mp_main__' else place}.{cls.__qualname__}.forward"
        if self.config.wants(name):
            return self._intern(Name.FUNCTION, name)
        return self._intern(Name.FUNCTION, name) | ROOTS_ONLY if self.config.wants(MODEL_CALL) else 0  # 0: not recorded

    def clock_moved(self) -> None:
        """Step, phase or what the user tells of them is another now."""
        self.recorder.ctx = self.contexts.base()
        if self.capsules is not None:
            self.capsules.clock_moved()

    def _state_ctx(self) -> int:
        return self.contexts.resolve(self.contexts.base(), True, "", "")

    def _value_ctx(self) -> int:
        import torch

        return self.contexts.resolve(self.contexts.base(), torch.is_grad_enabled(), "", "")

    def _wants_values(self) -> bool:
        return self.sampled and self.recorder.enabled and not self.inert and not self.finished

    def look(self, edge: int, call: int | None = None, **what: Any) -> None:
        """Observe state at a boundary, if this step is recorded."""
        if not self.armed or not self.sampled or self.inert or self.finished:
            return
        recorder = self.recorder
        where = recorder.current_call if call is None else call
        if not self.turns.begin_look():
            return
        try:
            self.guard.run("state", self._observe, recorder.current_seq, where, edge, what)
        finally:
            self.turns.end_look()

    def glance(self) -> None:
        """After an update in a step that a budget leaves out."""
        if self.sentinel is None or self.sampled or not self.armed or self.inert or self.finished or not self.turns.begin_look():
            return
        try:
            self.guard.run("glance", self.sentinel.glance)
        finally:
            self.turns.end_look()

    def _threads_train(self) -> None:
        self.guard.stop("two threads of this process train at once; their steps cannot be told apart, so nothing of it is judged")

    def _observe(self, seq: int, call: int, edge: int, what: dict[str, Any]) -> None:
        self.tracker.observe(seq, call, edge, self._state_ctx(), **what)

    def _resume(self) -> None:
        """Steps were left out: what is now is what later changes are held against."""
        everything = dict.fromkeys(("data", "grad", "buffers", "optimizer"), Look.FORCE)
        if self.turns.begin_look():
            try:
                self._observe(0, 0, 0, {**everything, "silent": True})
            finally:
                self.turns.end_look()

    def _look_late(self) -> None:
        self.steps.by_hand()
        self.look(0, 0, data=Look.HINT, grad=Look.HINT)

    def _new_step(self) -> None:
        """The clock is about to count a new step."""
        self.look(0, 0, data=Look.HINT)
        if not self.armed:
            return
        step, before = self.clock.step + 1, self.sampled
        within = self.budget is None or self.budget.next_step(step, self.recorder.current_seq)
        self.sampled = within and (step < self.config.warmup or step % max(self._sample_every, 1) == 0)
        self.recorder.enabled = self.sampled
        if before and not self.sampled:
            self.probes.thinned()
        elif self.sampled and not before:
            self.guard.run("state", self._resume)
        if self.sentinel is not None and not before and not self.sampled:
            self.writer.passed(step)
            return  # a budget leaves both out: nothing is new
        self.guard.run("state", self.tracker.rescan, step)
        self.guard.run("user code", self.user.sweep)
        self.probes.step_begins(step)
        self.writer.step_ended(self.recorder.pending + len(self.tracker.rows), step)
