"""Attaching to a process: dormant after `import torch`, armed by the first training act, inert in helpers.

Called by the injected `sitecustomize` (through `install_from`) or by `proctor.watch`. One `Observer` a process owns the
recorder, the patches, the clock, the tracker and the writer, and its methods are the hooks of the tapped functions.

Tripwires: the first `Optimizer.__init__`, or the end of `init_process_group`. What happens before (seeding,
construction, initialisation) waits in the recorder's buffer and is written when the process arms. The rule gives
exactly the training processes of every launcher that was tried (findings/ecosystem.md §1.2).
"""

from __future__ import annotations

import atexit
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from proctor.errors import ProctorError
from proctor.instrument import catalog, mesh
from proctor.instrument._guard import Guard, say
from proctor.instrument.config import RecordConfig, read_config
from proctor.instrument.context import ContextTable, StepClock
from proctor.instrument.patches import METHOD, MODULE_CALL, Patches
from proctor.instrument.probes import MAX_VALUES, Home, Probes, Sink, _workers
from proctor.instrument.state import Look, StateTracker
from proctor.instrument.usercode import UserCode, library_prefixes
from proctor.invariants.schema import MODEL_CALL, TRACE_SCHEMA, Name, Value
from proctor.native import Recorder

PRE_ARM_ROWS = 50_000  # records kept from before the first training act
MAX_ROWS = 4_000_000  # records in memory when the writer cannot keep up
MAX_UNSEEN = 2_000  # names of functions that are told not to be observed
HOT_CALLS = 20_000  # calls of one user function between two flushes that take it out of the trace

LOADER_WORKER = "torch.utils.data.worker"
ROOTS_ONLY = 1 << 31  # in a code of `module_namer`: wanted as the outermost module only

_observer: Observer | None = None


class Observer:
    """Everything that watches one process."""

    def __init__(self, config: RecordConfig) -> None:
        self.config = config
        self.guard = Guard()
        self.recorder = Recorder()
        self.patches = Patches(self.recorder)
        self.clock = StepClock()
        self.contexts = ContextTable(self.clock)
        self.sink = Sink(self.recorder, self._value_ctx, config, self._wants_values)
        self.probes = Probes(self.sink, self.guard.run)
        self.user = UserCode(self.patches, library_prefixes(), self._wants_user, self.probes)
        self.armed = False
        self.inert = False
        self.finished = False
        self._unseen: list[str] = []  # functions that can be called past their taps
        self.makes_run = False  # no command made the run directory: arming does
        self._libraries: list[str] = []  # that an integration knows
        self._coords: dict[str, int] = {}
        self._axes = mesh.Axes()
        self._position: tuple[int, int] | None = None  # rank and world, once torch.distributed has said them
        self._groups: list[Any] = []  # process groups that have a name; kept, so that their ids stay theirs
        self._phase_before = "init"
        self._notes: list[str] = []
        self._early_drops = 0
        self._early_values = 0
        self._in_backward = 0
        self._updating = 0
        self._sampled = True
        self._sample_every = config.every
        self._building = False  # a layer has been initialised
        self._hooked: list[Any] = []  # taps whose hooks must run at every step
        self._optimizer_count = 0
        self._patched_classes: set[type] = set()
        self.writer: Any = None
        self.tracker: Any = None
        self.capsules: Any = None

    # -- installation -------------------------------------------------------------------------------------

    def install(self) -> None:
        """Tap everything that the configuration asks for. The recorder fills a bounded buffer until `arm`."""
        import torch
        from torch import nn

        self.tracker = StateTracker(self._intern, self._watches)
        self.tracker.on_names = self.recorder.set_tracked_names
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
        self.clock.on_change = self._context_changed
        self.clock.on_new_step = self._new_step

        hooks = self._hooks()
        for point in catalog.points():
            before, after = hooks.pop(point.name, (None, None))
            self._tap(point, before, after)
        self._tap_module_calls(nn.Module)
        self._tap_constructors(torch)
        self._tap_process_exits()
        for name in catalog.LATE:
            wrapt.register_post_import_hook(self._late(catalog.late_points), name)
        self._install_integrations()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)
        recorder.enabled = True

    def _hooks(self) -> dict[str, tuple[Callable[..., None] | None, Callable[..., None] | None]]:
        """Functions at which state may change, or that tell step and phase."""
        hooks: dict[str, tuple[Callable[..., None] | None, Callable[..., None] | None]] = {
            "torch.Tensor.backward": (self._backward_begins, self._backward_ends),
            "torch.autograd.backward": (self._backward_begins, self._backward_ends),
            "torch.nn.Module.zero_grad": (self._module_zero_grad, self._grads_changed),
            "torch.nn.Module.load_state_dict": (None, self._data_changed),
            "torch.nn.utils.clip_grad_norm_": (None, self._grads_changed),
            "torch.nn.utils.clip_grad_value_": (None, self._grads_changed),
            "torch.amp.GradScaler.unscale_": (None, self._grads_rewritten),
            "torch.nn.parallel.DistributedDataParallel.__init__": (None, self._ddp_created),
            "torch.nn.parallel.DistributedDataParallel._pre_forward": (None, self._ddp_synchronised),
            "torch.distributed.init_process_group": (None, self._distributed_ready),
            "torch.distributed.new_group": (None, self._group_created),
            "torch.save": (self._save_begins, self._checkpoint_ends),
            "torch.load": (self._checkpoint_begins, self._checkpoint_ends),
        }
        for name in catalog.INITIALISERS:
            hooks[name] = (self._model_is_built, None)
        for name in catalog.COLLECTIVES:
            hooks.setdefault(name, (None, self._collective_done))
        if self.capsules is not None:
            hooks |= self.capsules.hooks()
        return hooks

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
        return self.armed and self._sampled and not self.inert and not self.finished and not self.contexts.recompute

    def _about(self) -> Any:
        from proctor.instrument._capsule_writer import facts

        return facts(self.config, self._info())

    def _tap(self, point: catalog.Point, before: Any = None, after: Any = None, home: Home = Home.TORCH) -> None:
        wanted = self.config.wants(point.name)
        ours = before is not None or after is not None
        before, after = self.probes.around(point.name, home, before, after)
        if not wanted and not ours:
            return
        tap = self.patches.tap(
            point.owner, point.attribute, point.name, kind=point.kind, before=before, after=after, aliases=point.aliases
        )
        if tap is not None:
            tap.record = wanted
            tap.flat = point.name in catalog.RECURSIVE
            if ours:
                tap.always = True
                if point.name != LOADER_WORKER:  # runs in a child that is inert
                    self._hooked.append(tap)

    def _tap_module_calls(self, module_class: Any) -> None:
        leaves = None if self.capsules is None else self.capsules.model_ends
        before, after = self.probes.around(MODEL_CALL, Home.TORCH, self._model_begins, leaves)
        tap = self.patches.tap(
            module_class, "__call__", "torch.nn.Module.__call__", kind=MODULE_CALL, before=before, after=after
        )
        if tap is not None:
            tap.root_only = True  # hooks run at the outermost module only
            tap.always = True
            tap.record = not self.config.selective or any(f.endswith(".forward") for f in self.config.functions or ())
            self._hooked.append(tap)

    def _tap_constructors(self, torch: Any) -> None:
        from torch.utils.data._utils import worker

        for owner, attribute, name, before, after in (
            (torch.optim.Optimizer, "__init__", "torch.optim.Optimizer.__init__", None, self._optimizer_created),
            (torch.optim.lr_scheduler.LRScheduler, "__init__", "torch.optim.lr_scheduler.LRScheduler.__init__",
             self._scheduler_created, None),
            (torch.optim.lr_scheduler.ReduceLROnPlateau, "__init__",
             "torch.optim.lr_scheduler.ReduceLROnPlateau.__init__", self._scheduler_created, None),
            (worker, "_worker_loop", LOADER_WORKER, self._loader_worker, None),
        ):
            self._tap(catalog.Point(owner, attribute, name, METHOD), before, after)

    def _tap_process_exits(self) -> None:
        """Flush before the process image goes away without Python's own exit."""
        for name in ("_exit", "execv", "execve", "execvp", "execvpe"):
            original = getattr(os, name)

            def leaving(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if not self.inert:
                    self.guard.run("exit", self.close, True)
                return _original(*args, **kwargs)

            leaving.__name__, leaving.__doc__, leaving.__module__ = name, original.__doc__, "os"
            self.patches.replace(os, name, leaving)

    def _late(self, points: Callable[[Any], Any], home: Home = Home.TORCH) -> Callable[[Any], None]:
        def imported(module: Any) -> None:
            self.guard.run(f"late {module.__name__}", self._tap_late, points, module, home)

        return imported

    def _tap_late(self, points: Callable[[Any], Any], module: Any, home: Home) -> None:
        for point in points(module):
            after = self._sharded if point.attribute in ("fully_shard", "parallelize_module") else None
            self._tap(point, None, after, home)
        if module.__name__ == "torch.distributed.device_mesh":
            point = catalog.Point(
                module.DeviceMesh, "__init__", "torch.distributed.device_mesh.DeviceMesh.__init__", METHOD
            )
            self._tap(point, None, self._mesh_created)

    def _install_integrations(self) -> None:
        from proctor.instrument import integrations

        for info in pkgutil.iter_modules(integrations.__path__):
            library = importlib.import_module(f"{integrations.__name__}.{info.name}")
            self._libraries.append(library.LIBRARY)
            for module, methods in library.POINTS.items():
                points = _library_points(library.LIBRARY, methods)
                wrapt.register_post_import_hook(self._late(points, Home.LIBRARY), module)

    def reach_early(self) -> None:
        """Make up for coming after the program's imports: its own names for our functions, and its own functions."""
        self._unseen.extend(self.patches.reach_names())
        self.user.sweep()

    # -- life ---------------------------------------------------------------------------------------------

    def arm(self, reason: str) -> None:
        """Begin to write: this process trains."""
        if self.armed or self.inert or self.finished:
            return
        from proctor.instrument.writer import TraceWriter

        if self.makes_run:
            from proctor.instrument.rundir import create_run

            try:
                create_run(Path(self.config.run), sys.argv or ["python"], overwrite=False, shared=True)
            except ProctorError as e:
                self._become_inert()
                say(f"not recording: {e}")
                return
        self.armed = True
        where = mesh.position()
        self._coords.update(where["coords"])
        folder = Path(self.config.run) / "procs" / f"{where['rank']}-{os.getpid()}"
        try:
            self.writer = TraceWriter(
                folder, self._drain, self._info, self._degrade, self.guard, self._sender(folder)
            )
        except OSError as e:
            self._become_inert()
            say(f"not recording: {folder}: {e.strerror or e}")
            return
        self._early_drops, self._early_values = self.recorder.dropped, self.sink.dropped
        self.recorder.capacity, self.sink.capacity = MAX_ROWS, MAX_VALUES
        self.user.sweep()
        self.recorder.enabled = True
        self.writer.start()
        if where["rank"] == 0:
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
                on_freeze=None if self.capsules is None else self.capsules.freeze,
            )
        except (ProctorError, OSError) as e:
            say(f"not streaming: {e}")
            return None

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
        self.finished = True
        self.recorder.enabled = False
        if not leaving:
            self.patches.remove()

    def pause(self, paused: bool) -> None:
        """Stop or resume observing without removing anything; for benchmarks. Steps meanwhile are not counted."""
        self._sampled = not paused
        self.recorder.enabled = not paused
        for tap in self._hooked:
            tap.always = not paused

    def _forked(self) -> None:
        """In a forked child: a child of a training process is a helper; a child of a launcher may yet train."""
        self.recorder.disable_in_child()
        if self.armed:
            self._become_inert()
        else:
            self.recorder.enabled = True

    def _become_inert(self) -> None:
        self.inert = True
        self.recorder.enabled = False
        for tap in self._hooked:
            tap.always = False

    def _loader_worker(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._become_inert()
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
                self._unseen.append(name)
                self._notes.append(f"{name} is called too often; no longer observed")

    def _info(self) -> dict[str, Any]:
        import torch

        where = mesh.position()
        rank, world = (where["rank"], where["world"]) if self._position is None else self._position
        return {
            "schema": TRACE_SCHEMA,
            "pid": os.getpid(),
            "rank": rank,
            "world": world,
            "restart": mesh.restarts(),
            "coords": self._coords or where["coords"] or self._axes.coords(rank, world),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "libraries": {
                name: str(getattr(sys.modules[name], "__version__", "")) for name in self._libraries if name in sys.modules
            },
            "dropped": self.recorder.dropped - self._early_drops + self.sink.dropped - self._early_values
            + (self.writer.lost + self.writer.torn if self.writer is not None else 0),
            "notes": self.guard.notes + self._notes + (self.capsules.notes if self.capsules is not None else []),
            "finished": self.finished,
            "unobserved": [*self._unseen, *self.user.left_alone][:MAX_UNSEEN],
            **self.probes.facts(),
        }

    def _degrade(self, failing: bool) -> None:
        """The disk is full: sample ever more sparsely; back to normal when it is not."""
        self._sample_every = min(max(self._sample_every, 1) * 10, 10_000) if failing else self.config.every
        if failing:
            self._notes.append("the trace could not be written for a while; steps were sampled")

    # -- names and contexts -------------------------------------------------------------------------------

    def _intern(self, kind: int, text: str) -> int:
        return int(self.recorder.intern(int(kind), text))

    def _name(self, thing: Any, label: str) -> None:
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

    def _context_changed(self) -> None:
        self.recorder.ctx = self.contexts.base()
        if self.capsules is not None:
            self.capsules.clock_moved()

    def _state_ctx(self) -> int:
        return self.contexts.resolve(self.contexts.base(), True, "", "")

    def _value_ctx(self) -> int:
        import torch

        return self.contexts.resolve(self.contexts.base(), torch.is_grad_enabled(), "", "")

    def _wants_values(self) -> bool:
        return self._sampled and self.recorder.enabled and not self.inert and not self.finished

    def _look(self, edge: int, call: int | None = None, **what: Any) -> None:
        """Observe state at a boundary, if this step is recorded."""
        if not self.armed or not self._sampled or self.inert or self.finished:
            return
        recorder = self.recorder
        where = recorder.current_call if call is None else call
        self.guard.run("state", self._observe, recorder.current_seq, where, edge, what)

    def _observe(self, seq: int, call: int, edge: int, what: dict[str, Any]) -> None:
        self.tracker.observe(seq, call, edge, self._state_ctx(), **what)

    def _look_late(self) -> None:
        self._look(0, 0, data=Look.HINT, grad=Look.HINT)

    # -- hooks: step and phase ----------------------------------------------------------------------------

    def _new_step(self) -> None:
        """The clock is about to count a new step."""
        self._look(0, 0, data=Look.HINT)
        if not self.armed:
            return
        step = self.clock.step + 1
        self.tracker.rescan(step)
        self.user.sweep()
        self._sampled = step < self.config.warmup or step % max(self._sample_every, 1) == 0
        self.recorder.enabled = self._sampled
        self.probes.step_begins(step)
        self.writer.step_ended(self.recorder.pending + len(self.tracker.rows), step)

    def _model_is_built(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """The first layer fills its parameters: time to observe the user's own functions, so that what runs before
        the first optimizer (sizes, totals, a library's set-up) is seen."""
        if not self._building and not self.inert:
            self._building = True
            self.guard.run("user code", self.user.sweep)

    def _optimizer_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if raised or self.inert:
            return
        optimizer = args[0]
        self._patch_class(type(optimizer), "torch.optim.Optimizer", catalog.OPTIMIZER_METHODS, {
            "step": (self._update_begins, self._update_ends),
            "zero_grad": (self._optimizer_zero_grad, self._grads_changed),
            "load_state_dict": (None, self._optimizer_loaded),
            "add_param_group": (None, self._group_added),
        })
        self.arm("an optimizer was constructed")
        self.clock.optimizer_created(id(optimizer))
        label = f"#{self._optimizer_count}"
        self._optimizer_count += 1
        self._name(optimizer, label)
        self.tracker.add_optimizer(optimizer, label)
        self._look(0, 0, data=Look.FORCE, grad=Look.HINT, buffers=Look.FORCE)

    def _group_added(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self.armed and not raised:
            self.tracker.refresh_optimizer(args[0])

    def _optimizer_loaded(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, optimizer=Look.FORCE)

    def _scheduler_created(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._patch_class(type(args[0]), "torch.optim.lr_scheduler.LRScheduler", catalog.SCHEDULER_METHODS, {})

    def _patch_class(self, cls: type, name: str, methods: tuple[str, ...], hooks: dict[str, Any]) -> None:
        """Tap the methods of a class where it or a base defines them; once a class."""
        if cls in self._patched_classes:
            return
        self._patched_classes.add(cls)
        for owner in cls.__mro__:
            for method in methods:
                if method in vars(owner):
                    before, after = hooks.get(method, (None, None))
                    self._tap(catalog.Point(owner, method, f"{name}.{method}", METHOD), before, after)

    def _update_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._updating += 1
        if self._updating > 1:
            return
        self.clock.update_begins(id(args[0]))
        if self.armed:
            self.tracker.note_lr(args[0])
        self._look(0, data=Look.HINT, grad=Look.HINT, buffers=Look.FORCE)

    def _update_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._updating -= 1
        if self._updating > 0:
            return
        self._updating = 0
        self._look(1, data=Look.FORCE, grad=Look.HINT, optimizer=Look.FORCE)
        if self.capsules is not None:
            self.capsules.update_ends()
        self.clock.update_ends(id(args[0]))

    def _optimizer_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._updating:  # in a closure, or by an optimizer that clears at the end of its step: of this step
            self.clock.zero_grad(id(args[0]))

    def _module_zero_grad(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._updating:
            self.clock.zero_grad(None)

    def _model_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        step = self.clock.step
        self._forward_begins(args, kwargs)
        if self.capsules is not None:
            self.capsules.model_begins(args, kwargs, opens=self.clock.step != step)

    def _forward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        import torch

        if self._in_backward or self._updating:
            return
        if not self.armed and self.recorder.pending >= PRE_ARM_ROWS:
            self.recorder.enabled = False  # a process that runs models and does not train
        module = args[0]
        training = bool(module.training) and torch.is_grad_enabled()
        self.clock.forward(training)
        if training and self.armed:
            if self.clock.step == 0:
                self.guard.run("rescan", self.tracker.rescan, 0)  # a layer replaced after the optimizer was built
            if not self.tracker.knows(module) and self.clock.step >= 0 and any(True for _ in module.parameters()):
                self.tracker.add_model(module)
            self._look(0, data=Look.HINT, grad=Look.HINT)

    def _backward_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._in_backward += 1
        if self._in_backward > 1:
            return
        self.clock.backward()
        self._look(0, data=Look.HINT, grad=Look.HINT)
        if self.capsules is not None:
            self.capsules.backward_begins(args)
        self.contexts.recompute += 1
        self._context_changed()

    def _backward_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._in_backward -= 1
        if self._in_backward > 0:
            return
        self._in_backward = 0
        self.contexts.recompute = 0
        self._context_changed()
        self._look(1, grad=Look.FORCE)

    def _grads_changed(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.HINT)

    def _grads_rewritten(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, grad=Look.FORCE)

    def _data_changed(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self._look(1, data=Look.FORCE, buffers=Look.FORCE)

    def _collective_done(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if self.tracker is not None:
            self.tracker.dirty = True

    def _save_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._look(0, data=Look.FORCE, buffers=Look.FORCE, optimizer=Look.FORCE)  # what is saved is compared with it
        self._checkpoint_begins(args, kwargs)

    def _checkpoint_begins(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self._phase_before = self.clock.checkpoint(True)

    def _checkpoint_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        self.clock.checkpoint(False, self._phase_before)

    # -- hooks: structure ---------------------------------------------------------------------------------

    def _distributed_ready(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if raised or self.inert:
            return
        where = mesh.position()
        self._position = where["rank"], where["world"]
        self.arm("torch.distributed was initialised")
        import torch.distributed as dist

        default = dist.distributed_c10d._get_default_group()
        self._name(default, mesh.group_label(default))

    def _group_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._axes.add(args[0] if args else (kwargs or {}).get("ranks"))
        if not raised and hasattr(result, "size"):
            self._name(result, mesh.group_label(result))
            self._groups.append(result)

    def _mesh_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._coords.update(mesh.mesh_coords(args[0]))

    def _ddp_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if raised or not self.armed:
            return
        self.tracker.set_wrapper(args[0], "ddp")
        self.tracker.add_model(args[0])
        self._look(1, data=Look.FORCE, buffers=Look.FORCE)

    def _ddp_synchronised(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """Buffers were broadcast, if they are at all, and the forward has not begun to change them."""
        self._look(1, buffers=Look.FORCE)

    def _sharded(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        module = args[0] if args else (kwargs or {}).get("module")
        if not raised and self.tracker is not None and hasattr(module, "parameters"):
            self.tracker.set_wrapper(module, "fsdp2" if type(module).__name__.startswith("FSDP") else "tp")


def _library_points(library: str, methods: dict[str, tuple[str, ...]]) -> Callable[[Any], Any]:
    def points(module: Any) -> Any:
        return catalog.library_points(module, library, methods)

    return points


def install_from(activation: str) -> None:
    """Install with the configuration in this file; called from `sitecustomize`."""
    install(read_config(Path(activation)))


def install(config: RecordConfig) -> Observer:
    """Install once a process; later calls return the observer that is there."""
    global _observer
    if _observer is None or _observer.finished:
        observer = Observer(config)
        observer.install()
        _observer = observer
    return _observer


def watch(*objects: Any, out: str | None = None) -> None:
    """See `proctor.watch`. Never raises: a program must not die of being watched."""
    try:
        _watch(objects, out)
    except Exception as e:  # noqa: BLE001 - the front door of the library inside the user's program
        say(f"not recording: {type(e).__name__}: {e}")


def attach(out: str | None = None) -> Observer | None:
    """Install in this process unless something records it already; dormant until the process trains.

    The run directory is made when the process arms, so that one that never trains leaves nothing behind.

    Args:
        out: run directory; without it `$PROCTOR_RUN`, with the settings that `proctor record` left there, or the name
            that `rundir.default_run` gives this job.

    Returns:
        the observer, `None` where recording is switched off.
    """
    if _observer is not None and not _observer.finished:
        return _observer
    if os.environ.get("PROCTOR_DISABLE") == "1":
        return None
    from proctor.instrument.rundir import default_run

    asked = os.environ.get("PROCTOR_RUN")
    left = Path(asked) / "boot" / "activation.json" if asked and out is None else None
    if left is not None and left.is_file():
        config = read_config(left)
    else:
        config = RecordConfig(run=str(Path(out or asked or default_run(os.environ)).resolve()))
    observer = install(config)
    observer.makes_run = True
    observer.guard.run("early names", observer.reach_early)
    return observer


def recording() -> bool:
    """Whether this process has an observer that may yet record."""
    return _observer is not None and not _observer.inert and not _observer.finished


def _watch(objects: tuple[Any, ...], out: str | None) -> None:
    import torch

    observer = attach(out)
    if observer is None:
        return
    observer.arm("proctor.watch")
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            observer.guard.run("watch", observer.tracker.add_model, thing)
        elif isinstance(thing, torch.optim.Optimizer):
            if not observer.tracker.holds(thing):
                observer.guard.run("watch", observer._optimizer_created, (thing,), None, None, False)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            observer.guard.run("watch", observer._scheduler_created, (thing,), None)


def meta(values: dict[str, Any]) -> None:
    """See `proctor.meta`."""
    if _observer is None or _observer.inert or _observer.finished:
        return
    for key, value in values.items():
        if value is None:
            _observer.contexts.meta.pop(str(key), None)
        else:
            _observer.contexts.meta[str(key)] = value if isinstance(value, bool | int | float) else str(value)[:200]
    _observer._context_changed()


def detach() -> None:
    """Stop recording and restore every patched function; for tests and notebooks."""
    global _observer
    if _observer is not None:
        _observer.close()
        _observer = None
