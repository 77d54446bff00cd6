"""One training step of this process, found by itself: from the first training forward of a model to the update's end.

Hooks of torch that hold for all modules and optimizers; the program is not changed. `begin` puts them on, and `finish`
takes them off; in a script that runs under the command line, `attach.py` does so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim

from proctor.oracle.prove.recording.attention import cut_by_heads
from proctor.oracle.prove.recording.before import Before
from proctor.oracle.prove.recording.recorder import Recorder
from proctor.oracle.prove.tape import ROOT, Tape, collective

WRAPPERS: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Session:
    """See the module.

    Args:
        rank, world: of this process; asked when the step begins where they are None.
        real: collectives carry values, as on gloo; they do not on a fake process group.
        finished: is called with the session when the step is over.
    """

    def __init__(self, rank: int | None = None, world: int | None = None, *, real: bool = True, finished: Callable[[Session], None] | None = None) -> None:
        self.rank, self.world, self.real = rank, world, real
        self.recorder: Recorder | None = None
        self.tape = Tape(0, 1)
        self.roots: list[tuple[str, nn.Module]] = []  # with what their names begin with here
        self.stack: list[str] = []
        self._paths: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._updating = 0
        self._updated = False
        self._early = False
        self._finished = finished
        self._undo: list[Callable[[], None]] = []
        self._reduction = "sum"
        self.before: Before | None = None
        self._flags: tuple[bool, bool] = (True, True)

    @property
    def updated(self) -> bool:
        """Whether an optimizer has taken its step."""
        return self._updated

    def begin(self) -> None:
        """Put the hooks on."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
            optim.register_optimizer_step_pre_hook(self._update),
            optim.register_optimizer_step_post_hook(self._updated_),
        ]
        self._watch_optimizers()
        self._undo += [handle.remove for handle in handles]
        self._note_reductions()
        self._leave_out_waits()
        self._leave_out_wrapping()
        self._undo.append(cut_by_heads())
        # scaled-dot-product attention by its mathematical definition: no fused kernel has a meaning of its own
        self._flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        onednn = torch._C._get_mkldnn_enabled()  # a recurrent layer is one kernel there
        torch._C._set_mkldnn_enabled(False)
        self._undo.append(lambda: torch._C._set_mkldnn_enabled(onednn))

    def follow(self, earlier: Sequence[Tape]) -> None:
        """On a fake process group: keep what its collectives would have done before the step."""
        assert self.rank is not None and self.world is not None
        self.before = Before(self.rank, self.world, self._taken, earlier)
        self._undo += [self.before.follow(), self.before.leave]

    def finish(self) -> None:
        """End the step if it has not ended, and take the hooks off."""
        if self.recorder is not None:
            self._end()
        while self._undo:
            self._undo.pop()()
        torch.backends.cuda.enable_flash_sdp(self._flags[0])
        torch.backends.cuda.enable_mem_efficient_sdp(self._flags[1])

    def start(self) -> None:
        """Begin to record now."""
        import torch.distributed as dist

        joined = dist.is_available() and dist.is_initialized()
        rank = self.rank if self.rank is not None else (dist.get_rank() if joined else 0)
        world = self.world if self.world is not None else (dist.get_world_size() if joined else 1)
        self.recorder = Recorder(rank, world, self._where, self._taken, real=self.real, before=self.before)
        self.recorder.__enter__()
        self.recorder.on = True

    def _watch_optimizers(self) -> None:
        """A stage of a pipeline receives before its first forward: from an optimizer's making on, communication is recorded."""
        original = torch.optim.Optimizer.__init__
        session = self

        @functools.wraps(original)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if session.recorder is None and not session._updated:
                session.start()
                session._early = True

        torch.optim.Optimizer.__init__ = made
        self._undo.append(lambda: setattr(torch.optim.Optimizer, "__init__", original))

    def _again(self, module: nn.Module) -> None:
        """The first training forward: what came before is kept if it has to do with other ranks, and parameters were there before it."""
        recorder = self.recorder
        self._early = False
        if recorder is not None and (not any(collective(node.op) for node in recorder.tape.nodes) or any(recorder.made(local(p)) for p in module.parameters())):
            recorder.forget()
        if self.before is not None and recorder is not None:
            recorder.__exit__(None, None, None)  # the older one is below it, and would be asked about each operation
            self.before.leave()
            recorder.__enter__()

    def _where(self) -> tuple[str, str]:
        return (self.stack[-1] if self.stack else ""), ("update" if self._updating else "forward")

    def _taken(self) -> str:
        taken, self._reduction = self._reduction, "sum"
        return taken

    def _note_reductions(self) -> None:
        """A collective's reduction is an object of C++ that cannot be asked; the options that it comes from can."""
        from torch.distributed import distributed_c10d as c10d

        for name in ("AllreduceOptions", "ReduceOptions", "ReduceScatterOptions"):
            original = getattr(c10d, name)
            setattr(c10d, name, self._noting(original))
            self._undo.append(lambda name=name, original=original: setattr(c10d, name, original))  # type: ignore[misc]

    def _leave_out_waits(self) -> None:
        """A backend may end a collective where it is waited for, such as gloo, which copies a part of what it has added up: that is the collective, not an operation."""
        from torch.distributed.distributed_c10d import Work

        original, session = Work.wait, self

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = session.recorder
            if recorder is None or not recorder.on:
                return original(work, *args, **kwargs)
            recorder.on = False
            try:
                return original(work, *args, **kwargs)
            finally:
                recorder.on = True

        Work.wait = wait
        self._undo.append(lambda: setattr(Work, "wait", original))

    def _leave_out_wrapping(self) -> None:
        """DDP compares the ranks' models and hands out the first one's as it is made: that is before the step, also where the optimizer was made earlier."""
        from torch.nn.parallel import DistributedDataParallel

        original, session = DistributedDataParallel.__init__, self

        @functools.wraps(original)
        def made(model: Any, *args: Any, **kwargs: Any) -> None:
            recorder = session.recorder
            early = recorder is not None and session._early and recorder.on
            if recorder is not None and early:
                recorder.on = False
            try:
                original(model, *args, **kwargs)
            finally:
                if recorder is not None and early:
                    recorder.on = True

        DistributedDataParallel.__init__ = made
        self._undo.append(lambda: setattr(DistributedDataParallel, "__init__", original))

    def _noting(self, original: Any) -> Any:
        session = self

        class Noting(original):  # type: ignore[misc]
            def __setattr__(self, key: str, value: Any) -> None:
                if key == "reduceOp":
                    session._reduction = str(value).rsplit(".", 1)[-1].lower()
                super().__setattr__(key, value)

        return Noting

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self.recorder is None and not self._updated:
            if not torch.is_grad_enabled() or not module.training or any(t.device.type == "meta" for t in module.parameters()):
                return
            if self.before is not None:
                self.before.leave()
            self.start()
        if self.recorder is None:
            return
        if self._early and (not torch.is_grad_enabled() or not module.training):
            return
        if self._early:
            self._again(module)
        if not self.stack and self._updated:
            self._end()
            return
        if not self.stack and id(module) not in self._paths:
            self.roots.append((self._beginning(module), module))
            for name, child in module.named_modules():
                self._paths.setdefault(id(child), plain(name))
            self._hold(*self.roots[-1])
        self.stack.append(self._paths.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.recorder is not None and self.stack:
            self.stack.pop()

    def _beginning(self, module: nn.Module) -> str:
        """Where a program calls several modules and not what holds them, names of the second may be those of the first: they get a number."""
        assert self.recorder is not None
        there = {held.name for held in self.recorder.tape.held}
        own = {plain(name) for name, _ in module.named_parameters(remove_duplicate=False)} | {"buffer " + plain(name) for name, _ in module.named_buffers()}
        return f"{ROOT}{len(self.roots)}." if there & own else ""

    def _hold(self, beginning: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), beginning + plain(name))
            self._hold_one(beginning + plain(name), parameter)
        for name, buffer in module.named_buffers():
            if buffer.dtype.is_floating_point:
                self._hold_one(f"buffer {beginning}{plain(name)}", buffer)

    def _hold_one(self, name: str, parameter: torch.Tensor) -> None:
        assert self.recorder is not None
        part = local(parameter)
        placed: dict[str, Any] = {}
        if hasattr(parameter, "placements"):
            mesh = parameter.device_mesh
            placed = {
                "placements": tuple(str(p) for p in parameter.placements),
                "mesh": tuple(mesh.mesh.shape), "coordinate": tuple(mesh.get_coordinate() or ()), "shape": tuple(parameter.shape),
            }
        self.recorder.hold(name, part, **placed)

    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.recorder is None:
            return
        self._updating += 1
        if self._updating == 1:
            self._mark_all(optimizer, "grad")

    def _updated_(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.recorder is None:
            return
        self._updating -= 1
        if self._updating == 0:
            self._updated = True

    def _mark_all(self, optimizer: Any, what: str) -> None:
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                name = self._names.get(id(parameter))
                if name is None:
                    name = self._names[id(parameter)] = f"?group{g}.{p}"
                    self._hold_one(name, parameter)
                if parameter.grad is not None:
                    self._mark(f"{what} {name}", parameter.grad)

    def _mark(self, what: str, tensor: torch.Tensor) -> None:
        assert self.recorder is not None
        pending = any(placed.is_partial() for placed in getattr(tensor, "placements", ()))
        if pending:  # DTensor adds it up when the optimizer uses it: the update shows whether it does
            self.recorder.note("gradients that DTensor holds as partial sums are compared by the update that they give")
        elif not tensor.is_sparse:
            self.recorder.mark(what, local(tensor))

    def _end(self) -> None:
        recorder = self.recorder
        assert recorder is not None
        if not self._updated:
            self._mark_gradients()
        for beginning, root in self.roots:
            for name, parameter in root.named_parameters(remove_duplicate=False):
                self._mark(f"after {beginning}{plain(name)}", parameter)
        recorder.on = False
        recorder.tape.done = True
        if torch.utils._python_dispatch._get_current_dispatch_mode() is recorder:
            recorder.__exit__(None, None, None)
        self.recorder, self.tape = None, recorder.tape
        if self.before is not None:
            self.tape.before, self.tape.relied = self.before.events, self.before.relied
        self.stack.clear()
        if self._finished:
            self._finished(self)

    def _mark_gradients(self) -> None:
        for beginning, root in self.roots:
            for name, parameter in root.named_parameters(remove_duplicate=False):
                if parameter.grad is not None:
                    self._mark(f"grad {beginning}{plain(name)}", parameter.grad)


def local(tensor: Any) -> torch.Tensor:
    """The rank's own part of a tensor that is spread over a mesh; a plain tensor is it itself."""
    found = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(found, "wait", None)
    return wait() if wait is not None and hasattr(found, "trigger_wait") else found.detach()


def plain(name: str) -> str:
    """A name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
