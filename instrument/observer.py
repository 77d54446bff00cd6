"""The observer of a process: dormant after `import torch`, armed by the first training act, inert in helpers.

It owns the recorder, the patches, the clock, the tracker and the writer. Its hooks are in `steps/acts.py` (step, phase), `steps/looks.py`
(state) and `observe/structure.py` (ranks, groups, meshes); `patch/taps.py` says which functions they hang on.

Tripwires: the first `Optimizer.__init__`, the end of `init_process_group`, or parameters that change after a backward in a program without
an optimizer. What happens before (seeding, construction, initialisation) waits in the recorder's buffer and is written when the process arms. The rule gives
exactly the training processes of every launcher that was tried (findings/ecosystem.md §1.2).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proctor.errors import ProctorError
from proctor.instrument.budget import make_budget
from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard, say
from proctor.instrument.observe.sentinel import Sentinel
from proctor.instrument.observe.state import Look, StateTracker
from proctor.instrument.observe.structure import Structure
from proctor.instrument.output import Output, say_nothing
from proctor.instrument.own_thread import OwnThread
from proctor.instrument.patch import catalog
from proctor.instrument.patch.compiled import anything_compiled
from proctor.instrument.patch.patches import Patches
from proctor.instrument.patch.taps import Taps
from proctor.instrument.patch.usercode import UserCode, library_prefixes
from proctor.instrument.probes import MAX_VALUES, Probes, Sink, _workers
from proctor.instrument.steps.acts import PRE_ARM_ROWS, Steps
from proctor.instrument.steps.asleep import Sleep
from proctor.instrument.steps.clock import ContextTable, StepClock
from proctor.instrument.steps.looks import Looks
from proctor.invariants.schema import MODEL_CALL, Name, Value
from proctor.native import Recorder

MAX_ROWS = 4_000_000  # records in memory when the writer cannot keep up
ROOTS_ONLY = 1 << 31  # in a code of `module_namer`: wanted as the outermost module only


class Observer:
    """Everything that watches one process."""

    def __init__(self, config: RecordConfig) -> None:
        self.config = config
        self.guard = Guard()
        self.output = Output(self)
        self.recorder = Recorder()
        self.budget = make_budget(config, self._threads)
        self.patches = Patches(self.recorder, None if self.budget is None else self.budget.meter)
        self.clock = StepClock()
        self.contexts = ContextTable(self.clock)
        self.looks = Looks(self)
        self.look, self.turns = self.looks.look, self.looks.turns
        self.sink = Sink(self.recorder, self._value_ctx, config, self.recorder.wants_values, self.turns.gradients)
        self.probes = Probes(self.sink, self.guard)
        self.guard.step, self.guard.on_end = lambda: self.clock.step, self.output.went_blind
        self.guard.ends |= self.probes.ends()
        self.user = UserCode(self.patches, library_prefixes(), self._wants_user, self.probes)
        self.armed = False
        self.inert = False
        self.finished = False
        self.unseen: list[str] = []  # functions that can be called past their taps
        self.makes_run = False  # no command made the run directory: arming does
        self.sampled = self._sampled_before = True
        self._arming = threading.Lock()
        self.writer: Any = None
        self.tracker: Any = None
        self.capsules: Any = None
        self.sentinel: Sentinel | None = None
        self.sleep: Sleep | None = None
        self.steps = Steps(self)
        self.structure = Structure(self)
        self.taps = Taps(self)

    def install(self) -> None:
        """Tap everything that the configuration asks for. The recorder fills a bounded buffer until `arm`."""
        import torch
        from torch import nn

        from proctor.instrument.observe import casts

        self.tracker = StateTracker(self.intern, self._watches)
        self.tracker.on_names = self.recorder.set_tracked_names
        self.sentinel = Sentinel(self.tracker, self.budget) if self.budget is not None and self.budget.share else None
        self.sleep = Sleep(self) if self.sentinel is not None else None
        self.guard.run("capsules", self._make_capsules)
        recorder = self.recorder
        recorder.capacity = PRE_ARM_ROWS
        recorder.set_tensor_types(torch.Tensor, nn.Parameter)
        recorder.set_module_type(nn.Module)
        recorder.set_library_prefixes(library_prefixes())
        # Not `cuda.is_available()`: asking the driver here would spoil CUDA for children that the program forks.
        devices = ("cpu", "cuda") if torch.version.cuda is not None else ("cpu",)
        anywhere = getattr(torch._C, "_is_any_autocast_enabled", None)  # one call instead of one a device type
        recorder.set_probes(torch.is_grad_enabled, casts.autocast_enabled, casts.autocast_dtype, devices, anywhere)
        # Reading a tensor's attributes must not run the user's TorchFunctionMode.
        recorder.set_torch_function_guard(torch._C._len_torch_function_stack, torch._C.DisableTorchFunction)
        recorder.set_context_resolver(self.contexts.resolve)
        recorder.module_namer = self._class_code
        recorder.on_error = lambda error: self.guard.report("hook", error)
        self.clock.on_change = self.clock_moved
        self.clock.on_new_step = self.new_step
        self.taps.lay()
        self.patches.wrap(torch, "compile", self._compiles)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)
        recorder.enabled = True

    def _compiles(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.guard.run("user code", self.user.compiles)
        return original(*args, **kwargs)

    def _watches(self, attr: str) -> bool:
        kept = self.config.capsules > 0 or bool(self.config.replay)
        return self.config.watches(attr) or (kept and attr != "optimizer")  # capsules look at that themselves

    def _make_capsules(self) -> None:
        if not self.config.capsules and not self.config.replay:
            return
        from proctor.instrument.capsules.writer import Facts, facts

        def about() -> Facts:
            return facts(self.config, self.output.info())

        kind: Any
        if self.config.replay:
            from proctor.instrument.replay.inside import Replayer as kind
        else:
            from proctor.instrument.capsules.ring import Capsules as kind
        self.capsules = kind(self.config, self.tracker, self.clock, self.guard, self._keeps_steps, about, self.turns.gradients)
        if self.budget is not None:
            self.capsules.looks_next = self.budget.looks_next

    def _keeps_steps(self) -> bool:
        return self.sampled and self.writes() and not self.contexts.recompute and not self.turns.broken

    # -- life ---------------------------------------------------------------------------------------------

    def reach_early(self) -> None:
        """Make up for coming after the program's imports: its own names for our functions, and its own functions."""
        self.unseen.extend(self.patches.reach_names())
        if anything_compiled():
            self.user.compiles()
        self.user.sweep()

    def arm(self, reason: str) -> None:
        """Begin to write: this process trains."""
        if self.armed or self.inert or self.finished or not self._arming.acquire(blocking=False):
            return  # two threads may make their first optimizers at once
        from proctor.instrument.record.writer import TraceWriter

        if self.makes_run:
            from proctor.instrument.record.rundir import create_run

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
                folder, self.output.drain, self.output.info, self.output.degrade, self.guard, self.output.sender(folder)
            )
        except OSError as e:
            self.become_inert()
            say(f"not recording: {folder}: {e.strerror or e}")
            return
        self.output.early_drops, self.output.early_values = self.recorder.dropped, self.sink.dropped
        self.recorder.capacity, self.sink.capacity = MAX_ROWS, MAX_VALUES
        self.user.sweep()
        self.recorder.enabled = True
        self.writer.start()
        if rank == 0:
            say(f"recording to {self.config.run} ({reason})", gap=False)

    def freeze(self, key: str, step: int) -> None:
        """The verifier has found something: the step is kept, and what comes is looked at in full."""
        if self.capsules is not None and key:
            self.capsules.freeze(key, step)
        if self.budget is not None:
            self.budget.wake()
        if self.sleep is not None:
            self.sleep.hurry()

    def _threads(self) -> list[OwnThread]:
        return self.writer.threads if self.writer is not None else []

    def close(self, leaving: bool = False) -> None:
        """Flush, say goodbye and put every function back. Called at exit."""
        if self.finished:
            return
        self._awake()
        if self.armed and not self.inert:
            self.guard.run("last-look", self.looks.late)
            self.probes.closing()
            if self.capsules is not None:
                self.guard.run("capsules", self.capsules.close)
            self.finished = True
            self.recorder.enabled = False
            self.writer.close()
        elif not self.finished and os.getpid() == self.config.command:
            say_nothing(self.config.run)
        self.finished = True
        self.recorder.enabled = False
        if not leaving:
            self.patches.remove()

    def pause(self, paused: bool) -> None:
        """Stop or resume observing without removing anything; for benchmarks. Steps meanwhile are not counted."""
        self._awake()
        if paused:
            self._sampled_before = self.sampled
        self.sampled = self.recorder.enabled = not paused and self._sampled_before
        self.taps.always(not paused)
        if not paused:
            self.taps.thin(not self.sampled)

    def _awake(self) -> None:
        if self.sleep is not None:
            self.guard.run("sleep", self.sleep.end)

    def _forked(self) -> None:
        """In a forked child: a child of a training process is a helper; a child of a launcher may yet train."""
        self.recorder.disable_in_child()
        if self.armed:
            self.become_inert()
        else:
            self.recorder.enabled = not self.inert and not self.finished

    def become_inert(self) -> None:
        """This process does not train: observe nothing more."""
        self.recorder.wake()
        self.inert = True
        self.recorder.enabled = False
        self.taps.always(False)

    def loader_worker(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """This process loads data for another."""
        self.become_inert()
        if self.config.keeps(Value.RNG) and self.config.wants("torch.utils.data.DataLoader.__iter__"):
            self.guard.run("loader worker", _workers.observe, self.config.run)

    # -- names and contexts -------------------------------------------------------------------------------

    def intern(self, kind: int, text: str) -> int:
        """Code of a name."""
        return int(self.recorder.intern(int(kind), text))

    def name(self, thing: Any, label: str) -> None:
        """What signatures call this object."""
        self.tracker.names[id(thing)] = label
        self.recorder.track(id(thing), label)

    def _wants_user(self, name: str) -> bool:
        return self.config.user_code if not self.config.selective else self.config.wants(name)

    def _class_code(self, cls: type) -> int:
        name = catalog.forward_name(cls)
        if self.config.wants(name):
            return self.intern(Name.FUNCTION, name)
        return self.intern(Name.FUNCTION, name) | ROOTS_ONLY if self.config.wants(MODEL_CALL) else 0  # 0: not recorded

    def clock_moved(self) -> None:
        """Step, phase or what the user tells of them is another now."""
        if self.sampled or not self.armed:  # in a step that is left out nobody asks
            self.recorder.ctx = self.contexts.base()
        if self.capsules is not None:
            self.capsules.clock_moved()

    def _value_ctx(self) -> int:
        import torch

        return self.contexts.present(torch.is_grad_enabled())

    def writes(self) -> bool:
        """Whether what is seen now is written."""
        return self.armed and not self.inert and not self.finished

    def new_step(self) -> None:
        """The clock is about to count a new step."""
        self.look(0, 0, data=Look.HINT)
        if not self.armed:
            return
        step, before = self.clock.step + 1, self.sampled
        within = self.budget is None or self.budget.next_step(step, self.recorder.current_seq)
        self.sampled = within and (step < self.config.warmup or step % max(self.output.sample_every, 1) == 0)
        self.output.skipped += within and not self.sampled
        self.recorder.enabled = self.sampled
        if self.sentinel is not None and before is not self.sampled:
            self.taps.thin(not self.sampled)
            self.writer.rest(not self.sampled)
        if before and not self.sampled:
            self.probes.thinned()
        elif self.sampled and not before:
            self.guard.run("state", self.looks.resume)
        if self.sentinel is not None and not before and not self.sampled:
            self.writer.passed(step)
            return  # a budget leaves both out: nothing is new
        self.guard.run("state", self.tracker.rescan, step)
        self.guard.run("user code", self.user.sweep)
        self.probes.step_begins(step)
        self.writer.step_ended(self.recorder.pending + len(self.tracker.rows), step)
