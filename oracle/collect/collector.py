"""Records one process of a run: what crosses the edges of modules, parameters and gradients of the first steps.

Nothing is asked of the user's code. Models are found when the first of them is called for training; their modules get
a tap at input and output (`taps.py`). A step begins with the first training forward after an optimizer's step (or after
gradients were cleared following a backward pass). Main gradients are read when an optimizer is about to use them,
parameters before the first forward and when the next step uses them (an optimizer may gather them that late).

After `steps` steps everything is taken off again and the process goes on as if nothing had been there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import wrapt
from torch import nn
from torch.utils import _pytree as pytree

from proctor.oracle.collect import settings, spans
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.collect.decisions import Decisions, Place
from proctor.oracle.collect.forced import Forced
from proctor.oracle.collect.ops import OpRecorder
from proctor.oracle.collect.own_noise import OwnOperations
from proctor.oracle.collect.regions import Edge, Regions, anything_compiled, skip_frames, unseen
from proctor.oracle.collect.replayed import Replayed
from proctor.oracle.collect.roots import Modules, Names, is_torch_module, local_of, source_of, unwrapped
from proctor.oracle.collect.taps import FP8_SIGMA, UNIT_ROUNDOFF, noisy, recomputing, tap, watched
from proctor.oracle.collect.updates import shaken
from proctor.oracle.frameworks import framework_of
from proctor.oracle.store import DTYPES, Draw, ProcessInfo, RankWriter

_DTYPES = {getattr(torch, name): name for name in DTYPES}
_GRADS = ("main_grad", "grad")


class Collector:
    """Everything that watches one process of a run.

    Args:
        config: what to record and where.
        force: gives, for a tensor at a module's edge, the value that the reference had there.
    """

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.modules = Modules()
        self.names = Names()
        self.writer: RankWriter | None = None
        self.info = ProcessInfo(rank=0, world=1, pid=os.getpid())
        self.force: Forced | None = None
        self.given: Forced | None = None
        self.choices: Forced | None = None
        self.decisions = Decisions(self, "draw" if config.replay else config.dropout)
        self.ops: OpRecorder | None = None
        self.replayed = Replayed(config.replay) if config.replay else None
        self._roots: list[nn.Module] = []
        self._main_known = False
        self._trial = False  # a library tries modules out
        self._active = 0  # depth of calls of hooked roots
        self._begun = False
        self._over = False
        self._step = 0
        self._stepped = False  # an optimizer has stepped since the last forward
        self._backward = False  # gradients were computed since the last boundary
        self._cleared = False  # … and cleared again, without a step
        self._boundary = False  # the forward that begins is that of the next step
        self._calls: dict[str, int] = {}
        self._recomputes: dict[str, int] = {}
        self._metas: dict[str, tuple[str, str, str]] = {}  # name → name, class and source of a module
        self._running: list[tuple[str, int, bool]] = []  # modules that run now: name, call, recompute
        self._taken: set[tuple[int, str]] = set()  # main gradients of this step
        self._spans: dict[int, list[spans.Span]] = {}
        self._foreign: dict[int, Any] = {}
        self._sharded: set[str] = set()  # parameters that are DTensors
        self._after: set[str] = set()
        self._optimizers: list[weakref.ref[Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._losses = 0
        self._fp8: set[str] = set(config.fp8)
        self._failed = False
        self._restores: list[Callable[[], None]] = []  # of what noise did to optimizers that step now
        self._own = OwnOperations(config.noise, config.busy, self._running) if config.watch_busy or config.busy else None
        if self._own is not None:
            self._undo.append(self._own.close)
        self.regions = Regions(config.compiled)
        self._versions: dict[int, int] = {}  # of parameters, when gradients were last computed
        self._hidden = False  # the model's forward is compiled as a part of something else
        if self.regions.on:
            skip_frames(Collector)
            self._enter, self._leave = unseen(self._enter), unseen(self._leave)  # type: ignore[method-assign]

    # -- putting it there -----------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch what tells of models and steps; everything else waits for the first training forward."""
        self._wrap(nn.Module, "__init__", self._constructed)
        self._wrap(nn.Module, "__call__", self._called)
        self._wrap(torch.autograd, "backward", self._backwards)
        self.decisions.install(self._wrap)
        for module in (nn.utils, nn.utils.clip_grad):
            self._wrap(module, "clip_grad_norm_", self._clipped)
            if hasattr(module, "clip_grads_with_norm_"):  # torch 2.6: by a norm that the program put together
                self._wrap(module, "clip_grads_with_norm_", self._scaled)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zeroed)
        self._wrap(torch.optim.Optimizer, "__init__", self._made_optimizer)
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        for handle in (
            register_optimizer_step_pre_hook(self._guarded(self._before_update)),
            register_optimizer_step_post_hook(self._guarded(self._after_update)),
        ):
            self._undo.append(handle.remove)
        if self.config.watch_fp8:
            self._wrap(torch.Tensor, "to", self._converted)
        wrapt.register_post_import_hook(self._guarded(self._find_trials), "torch.distributed.pipelining.stage")
        if self.replayed is not None:
            self.replayed.install(self._wrap, lambda: not (self._active or self._over or self._boundary))
        at_exit = self._guarded(self._at_exit)
        atexit.register(at_exit)
        self._undo.append(lambda: atexit.unregister(at_exit))

    def adopt(self, models: Sequence[nn.Module]) -> None:
        """Take models, and optimizers, that were made before; the first model's modules have no prefix. After `install`."""
        for module in (m for model in models for m in model.modules()):
            self.modules.add(module)
        for model in models:
            if id(model) not in self.names.modules:
                self._discover(model)
        made = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        self._optimizers += [weakref.ref(o) for o in made]

    def end(self) -> None:
        """Nothing more comes: write what there is, as at the end of the process."""
        self._guarded(self._at_exit)()
        self._over = True
        self.remove()

    def abandon(self) -> None:
        """End without a recording that anybody would take for a whole one."""
        if not self._over:
            self._finish(done=False)
        self.remove()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is not wrapper:
                return
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off; a process that goes on is the user's alone."""
        while self._undo:
            self._undo.pop()()

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - the user's program goes on
                self._fail(e)

        return unseen(run) if self.regions.on else run

    def _fail(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        if os.environ.get("PROCTOR_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        line = f"recording failed: {type(error).__name__}: {error}".splitlines()[0]
        print(f"proctor: oracle: {line}", file=sys.stderr)
        self.info.notes.append(line)
        self._finish(done=False)

    # -- what the patches see -------------------------------------------------------------------------------

    def _constructed(self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self.modules.add(module)

    def _made_optimizer(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._active and not self._over and not self._trial and torch.is_grad_enabled() and not recomputing():
            self._guarded(self._outermost)(module)
            if self.replayed is not None and self._begun and not self._boundary and not self._over:
                self._guarded(self.replayed.call)(args, kwargs)
            return self._deciding(original, module, *args, **kwargs)
        return self._called_inside(original, module, *args, **kwargs)

    def _deciding(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """An outermost call, whose decisions are seen; in compiled code nothing of ours may stand, so only that it draws is."""
        if self.regions.on and torch.compiler.is_compiling():
            return self._called_inside(original, module, *args, **kwargs)
        if not self.regions.names:
            return self.decisions.around(self._called_inside, original, module, *args, **kwargs)
        before = torch.random.default_generator.get_state()
        output = self._called_inside(original, module, *args, **kwargs)
        self.info.random |= not torch.equal(before, torch.random.default_generator.get_state())
        return output

    def _called_inside(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None and not self._own.watching and self._begun and not self._over:
            with self._own:
                return original(module, *args, **kwargs)
        edge = self.regions.edges.get(id(module))
        if edge is None or self.regions.running or self._over:
            return original(module, *args, **kwargs)
        return self._called_at(edge, original, module, args, kwargs)

    def _called_at(self, edge: Edge, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = self._enter(edge.meta, args, kwargs, edge.key, "input" not in edge.left_out)
        if changed is not None:
            args, kwargs = changed
        self.regions.running = edge.compiled
        try:
            output = original(module, *args, **kwargs)
        finally:
            self.regions.running = False
        other = self._leave(edge.meta, output, "output" not in edge.left_out)
        return output if other is None else other

    def _find_trials(self, stages: Any) -> None:
        """Pipeline stages first run forwards and backwards on empty tensors to learn shapes; that is no microbatch."""
        for cls in vars(stages).values():
            for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
                if not self._over and isinstance(cls, type) and name in vars(cls):
                    self._wrap(cls, name, self._on_trial)

    def _on_trial(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._trial = self._trial, True
        try:
            return original(*args, **kwargs)
        finally:
            self._trial = before

    def _backwards(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self.regions.on and not self._over and not self._trial and (self._hidden or not self._begun):
            result = original(tensors, *args, **kwargs)
            self._guarded(self._hidden_backward)()
            return result
        if not self._over and self._begun:
            self._guarded(self._loss)(tensors)
            if self.replayed is not None:
                self.replayed.backward()
            self._backward = True
            self._note_versions()
            if self.ops is not None:
                with self.ops.backward():
                    return original(tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    def _hidden_backward(self) -> None:
        """Gradients came to parameters of a model whose call was never seen: a compiled function calls it."""
        self._hidden_update()
        if self._hidden and self._stepped:
            self._next_step()
        if not self._begun and anything_compiled():
            trained = [r for r in self.modules.roots() if any(p.grad is not None for p in r.parameters())]
            if not trained:
                return
            self._hidden = True
            self._discover(trained[0])
            self.regions.names.add(self.names.modules.get(id(unwrapped(trained[0])), ""))
            self._begin()
        if self._begun:
            self._backward = True
            self._note_versions()

    def _note_versions(self) -> None:
        if self.regions.on:
            self._versions = {id(p): p._version for _, p in self._parameters()}

    def _hidden_update(self) -> None:
        """See whether an optimizer stepped within compiled code, where its hooks are not called."""
        if not self.regions.on or not self._backward or self._stepped or not anything_compiled():
            return
        moved = {id(p) for _, p in self._parameters() if p._version != self._versions.get(id(p), p._version)}
        for optimizer in [o for ref in self._optimizers if (o := ref()) is not None] if moved else ():
            if any(id(p) in moved for group in optimizer.param_groups for p in group["params"]):
                self._before_update(optimizer, (), {})
                self._after_update(optimizer, (), {})

    def _zeroed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._backward:
            if self.regions.on:
                self._guarded(self._hidden_update)()
            self._cleared = True
        return original(*args, **kwargs)

    def _clipped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._over and self._begun:
            args, kwargs = settings.listed(args, kwargs)
            self._guarded(self._before_clipping)(args[0] if args else kwargs.get("parameters"))
        norm = original(*args, **kwargs)
        if not self._over and self._begun and isinstance(norm, torch.Tensor):
            self._guarded(self._after_clipping)(norm, args, kwargs)
        return norm

    def _scaled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._over and self._begun:
            args, kwargs = settings.listed(args, kwargs)
            self._guarded(self._before_clipping)(args[0] if args else kwargs.get("parameters"))
        return original(*args, **kwargs)

    def _after_clipping(self, norm: torch.Tensor, args: Any, kwargs: Any) -> None:
        value = float(self._scalar("grad_norm", norm))
        self.info.clips.append(settings.clip_of(self._step, value, args, kwargs, self._held_by))

    def _held_by(self, tensor: Any) -> Iterator[str]:
        """Parameters of which a tensor of an optimizer holds elements."""
        if id(tensor) in self._foreign:
            yield from (span.name for span in self._spans.get(id(tensor), ()))
        elif id(tensor) in self.names.parameters:
            yield self.names.parameters[id(tensor)]

    def _before_clipping(self, parameters: Any) -> None:
        """Gradients as they were: clipping hides a wrong scale."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        if not isinstance(tensors, list | tuple):
            return
        for tensor in tensors:
            name = self.names.parameters.get(id(tensor))
            grad = getattr(tensor, "grad", None)
            if name is not None and grad is not None and (self._step, f"{name}/unclipped") not in self._taken:
                self._taken.add((self._step, f"{name}/unclipped"))
                self._record(grad, call=0, kind="main_grad", meta=self._owner(name), slot="unclipped")

    def _converted(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if self._running and isinstance(result, torch.Tensor) and result.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self._fp8.update(name for name, _, _ in self._running[-2:])
        return result

    # -- steps ----------------------------------------------------------------------------------------------

    def _outermost(self, module: nn.Module) -> None:
        """A module is called that no other module called."""
        if id(module) not in self.names.modules:
            if not any(p.requires_grad for p in module.parameters()) and not self._begun:
                return  # not training yet
            self._discover(module)
        self._hidden_update()
        if not self._begun:
            self._begin()
        elif self._stepped or (self._backward and self._cleared):
            self._boundary = True

    def _discover(self, called: nn.Module) -> None:
        roots = self.modules.roots()
        inside = [r for r in roots if any(m is called for m in r.modules())]
        if not inside:
            inside = [called]  # built before we came, or without parameters: a loss module
        ordered = inside + ([r for r in roots if r is not inside[0]] if not self._main_known else [])
        for root in ordered:
            prefix = None
            if not self._main_known and any(True for _ in root.parameters()):
                prefix, self._main_known = "", True
            known = framework_of(root)
            left_out = known.left_out(root) if known is not None else {}
            hidden, regions = self.regions.inside(root), {id(m) for m in self.regions.calls(root)}
            for name, module in self.names.add_root(root, prefix, known.canonical_names(root) if known is not None else None):
                if id(module) in hidden:
                    self._edge(name, module, left_out.get(name, frozenset()), compiled=False)
                elif id(module) not in regions:
                    self._hook(name, module, left_out.get(name, frozenset()))
            self._add_regions(root, left_out)
            if any(True for _ in root.parameters()):
                self._roots.append(root)

    def _add_regions(self, root: nn.Module, left_out: Mapping[str, frozenset[str]]) -> None:
        for module in self.regions.calls(root):
            name = self.names.modules.get(id(unwrapped(module)), "")
            self._edge(name, module, left_out.get(name, frozenset()), compiled=True)
        self.regions.names.update(self.names.modules.get(id(m), "") for m in self.regions.with_forward(root))

    def _edge(self, name: str, module: nn.Module, left_out: frozenset[str], *, compiled: bool) -> None:
        """Look at a module where it is called."""
        inner = unwrapped(module)
        self.regions.edges[id(module)] = Edge(_meta(name, inner), f"{name}\0{id(inner)}", left_out, compiled)
        if compiled:
            self.regions.names.add(name)

    def _begin(self) -> None:
        self._begun = True
        self._identify()
        folder = Path(self.config.folder) / f"rank{self.info.rank}"
        from safetensors.torch import save_file

        try:
            self.writer = RankWriter(folder, save_file)
        except FileExistsError:
            self._over = True  # another process of this rank came first (an evaluation, a second job of a script)
            self.remove()
            return
        self.names.rename_parameters(self._roots)
        chunks = [r for r in self._roots if framework_of(r) is not None]
        if chunks and not self.config.plan and (known := framework_of(chunks[0])) is not None:
            self.info.plan = known.plan_of(chunks).to_json().decode()
        if self.config.generate is not None:
            self._overwrite(functools.partial(self._generate, self.config.generate))
        if self.replayed is not None:
            self._overwrite(functools.partial(self.replayed.begin, self))
        self._record_parameters("param", lambda p: True)
        if self.config.force:
            self.force = Forced(self.config.force, self.info.rank)
        if self.config.given:
            self.given = Forced(self.config.given, self.info.rank)
        self.choices = Forced(self.config.decisions, self.info.rank) if self.config.decisions else self.force
        if self.info.rank in self.config.ops:
            self.ops = OpRecorder(self.config.ops[self.info.rank], self.config.ops_step, self._record_op)

    def _generate(self, seed: int) -> None:
        from proctor.oracle.generate import generate_parameters

        plan = self.config.plan or self.info.plan
        self.info.notes += generate_parameters(self._parameters(), seed, plan, self.info.rank, self.info.world)

    def _overwrite(self, parameters: Callable[[], None]) -> None:
        """Have the parameters overwritten, and then the copies that optimizers made of them."""
        for optimizer in [o for ref in self._optimizers if (o := ref()) is not None]:
            self._flatten_foreign(optimizer)
        parameters()
        named = dict(self._parameters())
        with torch.no_grad():
            for key, tensor in self._foreign.items():
                flat = local_of(tensor.detach()).view(-1)
                for span in self._spans[key]:
                    values = local_of(named[span.name].detach()).flatten()[span.start : span.stop]
                    flat[span.at : span.at + values.numel()] = values.to(flat.dtype)

    def _identify(self) -> None:
        dist = torch.distributed
        rank, world = int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        from proctor.instrument.mesh import position

        self.info.rank, self.info.world = rank, world
        self.info.coords = dict(position()["coords"])

    def _next_step(self) -> None:
        if not self._stepped:
            self.info.notes.append(f"step {self._step}: gradients were cleared without an optimizer's step")
        self._record_after()
        self._step += 1
        self._stepped = self._backward = self._cleared = False
        self._calls, self._recomputes, self._taken, self._after, self._losses = {}, {}, set(), set(), 0
        self.decisions.next_step()
        if self._step >= self.config.steps:
            self._finish(done=True)
        elif self.writer is not None:
            self.writer.flush()

    def _at_exit(self) -> None:
        if self._begun and not self._over:
            self._hidden_update()
            if self._stepped or self._backward:
                self._record_after()
                self._step += 1
            self._finish(done=True)

    def _finish(self, *, done: bool) -> None:
        self._over = True
        self.remove()
        self.info.steps, self.info.done = self._step, done
        self.info.fp8 = sorted(self._fp8)
        self.info.busy = sorted(self._own.busy) if self._own is not None else []
        self.info.compiled = sorted(self.regions.names)
        if self.writer is not None:
            try:
                if self.replayed is not None:
                    self.replayed.close(self.writer.folder)
                if self.ops is not None:
                    self.ops.close(self.writer.folder)
                self.writer.close(self.info)
            except Exception as e:  # noqa: BLE001 - a full disk is said, the program goes on
                print(f"proctor: oracle: cannot write {self.writer.folder}: {e}", file=sys.stderr)
            self.writer = None
        self._foreign.clear()

    # -- modules --------------------------------------------------------------------------------------------

    def _hook(self, name: str, module: nn.Module, left_out: frozenset[str] = frozenset()) -> None:
        """Tap a module's input and output, but for sides that the model as a whole does not have there."""
        if isinstance(module, torch.jit.ScriptModule):
            self.info.notes.append(f"{name}: a TorchScript module is not looked into")
            return
        meta = self._metas[name] = _meta(name, module)
        key = f"{name}\0{id(module)}"  # chunks of one model count their calls apart

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if self.regions.running else self._enter(meta, args, kwargs, key, "input" not in left_out)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return None if self.regions.running else self._leave(meta, output, "output" not in left_out)

        try:
            handles = [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=False),
            ]
        except Exception as e:  # noqa: BLE001 - a module with rules of its own
            self.info.notes.append(f"{name}: cannot be hooked: {type(e).__name__}")
            return
        self._undo += [h.remove for h in handles]

    def _enter(self, meta: tuple[str, str, str], args: Any, kwargs: Any, key: str, wanted: bool) -> Any:
        if self._over or self._trial or self.writer is None:
            return None
        if self._boundary:  # behind the program's own hooks, which may gather parameters that late
            self._boundary = False
            self._guarded(self._next_step)()
            if self._over:
                return None
        name = meta[0]
        again = recomputing()
        counts = self._recomputes if again else self._calls
        call = counts.get(key, 0)
        if not self._active and not torch.is_grad_enabled() and not again:
            return None  # an evaluation
        counts[key] = call + 1
        if not again:  # checkpointing ends a recomputation by an exception: its calls never leave
            self._running[:] = [r for r in self._running if not r[2]]
            self._active += 1
        self._running.append((name, call, again))
        if self._own is not None:
            self._own.entered(self._running[-1])
        try:
            if self.ops is not None and not again:
                return self._enter_recorded(self.ops, meta, call, (args, kwargs), wanted)
            return self._cross(meta, call, again, "input", (args, kwargs)) if wanted else None
        except Exception as e:  # noqa: BLE001 - the user's forward goes on
            self._fail(e)
            return None

    def _leave(self, meta: tuple[str, str, str], output: Any, wanted: bool) -> Any:
        if self._over or self.writer is None:
            return None
        while self._running and self._running[-1][0] != meta[0]:
            self._active -= not self._running.pop()[2]  # a call that an exception ended
        if not self._running:
            return None
        _, call, again = self._running.pop()
        self._active -= not again
        try:
            if self.ops is not None and not again:
                return self._leave_recorded(self.ops, meta, call, output, wanted)
            return self._cross(meta, call, again, "output", output) if wanted else None
        except Exception as e:  # noqa: BLE001 - the user's forward goes on
            self._fail(e)
            return None

    def _enter_recorded(self, ops: OpRecorder, meta: tuple[str, str, str], call: int, values: Any, wanted: bool) -> Any:
        """As without `ops`, telling what the caller gives and what the module gets."""
        ops.entering(meta[0], call, _named(values, "input"))
        changed = self._cross(meta, call, False, "input", values) if wanted else None
        ops.entered(meta[0], call, self._step, _named(values if changed is None else changed, "input"))
        return changed

    def _leave_recorded(self, ops: OpRecorder, meta: tuple[str, str, str], call: int, output: Any, wanted: bool) -> Any:
        ops.leaving(meta[0], call, _named(output, "output"))
        changed = self._cross(meta, call, False, "output", output) if wanted else None
        ops.left(meta[0], call, _named(output if changed is None else changed, "output"))
        return changed

    def _record_op(self, tensor: torch.Tensor, number: int, place: int, call: int) -> None:
        self._record(tensor, call=call, kind="op", meta=(str(number), "", ""), slot=str(place))

    def _cross(self, meta: tuple[str, str, str], call: int, again: bool, side: str, values: Any) -> Any:
        leaves, spec = pytree.tree_flatten(values)
        if not any(isinstance(x, torch.Tensor) for x in leaves):
            return None
        slots = _slots(values, leaves, side)
        out = list(leaves)
        changed = False
        for i, (slot, x) in enumerate(zip(slots, leaves, strict=True)):
            if not isinstance(x, torch.Tensor):
                continue
            if self.given is not None and side == "input":
                other = self.given(self._step, side, meta[0], slot, call, x)
                changed = changed or other is not None
                out[i] = x = x if other is None else other
            if not x.is_floating_point():
                self._record(x, call=call, kind=side, meta=meta, slot=slot, recompute=again)
                continue
            out[i] = self._tapped(x, meta, call, again, side, slot)
            changed = changed or out[i] is not x
        return pytree.tree_unflatten(out, spec) if changed else None

    def _tapped(self, x: torch.Tensor, meta: tuple[str, str, str], call: int, again: bool, side: str, slot: str) -> torch.Tensor:
        name = meta[0]
        seed = self.config.noise
        sigma = UNIT_ROUNDOFF.get(x.dtype, 0.0) if side == "output" else FP8_SIGMA if name in self._fp8 else 0.0
        grad_sigma = UNIT_ROUNDOFF.get(x.dtype, 0.0) if side == "output" else 0.0
        given = self.given if self.given is not None and self.given.holds(self._step, f"grad_{side}", name, slot, call) else None

        def on_value(value: torch.Tensor) -> torch.Tensor | None:
            other = None
            if seed is not None and sigma:
                other = noisy(value.detach(), sigma, seed, side, name, slot, call)
            self._record(value if other is None else other, call=call, kind=side, meta=meta, slot=slot, recompute=again)
            if self.force is not None and side == "input":
                other = self.force(self._step, "input", name, slot, call, value.detach())
            return other

        def on_grad(grad: torch.Tensor) -> torch.Tensor | None:
            other = given(self._step, f"grad_{side}", name, slot, call, grad.detach()) if given is not None else None
            if seed is not None and grad_sigma:
                other = noisy(grad.detach() if other is None else other, grad_sigma, seed, f"grad_{side}", name, slot, call)
            if not self._over:
                self._record(grad if other is None else other, call=call, kind=f"grad_{side}", meta=meta, slot=slot)
            if self.force is not None and side == "output":
                other = self.force(self._step, "grad_output", name, slot, call, grad.detach())
            if self.ops is not None:
                self.ops.crossed(side, name, slot, call, grad, grad if other is None else other)
            return other

        def safely(function: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def run(value: torch.Tensor) -> torch.Tensor | None:
                try:
                    with torch.no_grad(), self.ops.paused() if self.ops is not None else contextlib.nullcontext():
                        return function(value)
                except Exception as e:  # noqa: BLE001 - the user's pass goes on
                    self._fail(e)
                    return None

            return run

        if seed is None and self.force is None and given is None and not (x.requires_grad and x.is_leaf):
            safely(on_value)(x)
            return watched(x, safely(on_grad), own_edge=side == "input")
        return tap(x, safely(on_value), safely(on_grad))

    # -- decisions ------------------------------------------------------------------------------------------

    def recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._begun and not self._over and not self._trial and self.writer is not None

    def place(self) -> Place | None:
        """The innermost module that runs; of those that are computed again, only while a backward pass is running."""
        if not self._running or self._running[-1][2] != recomputing():
            return None
        return Place(*self._running[-1])

    def keep(self, tensor: torch.Tensor, kind: str, place: Place, slot: str) -> None:
        """Record what a module chose, and by what."""
        self._record(tensor, call=place.call, kind=kind, meta=self._metas[place.name], slot=slot)

    def told(self, place: Place, kind: str, slot: str, own: torch.Tensor) -> torch.Tensor | None:
        """The reference's choice, or mask, in the place of a module's own."""
        return self.choices(self._step, kind, place.name, slot, place.call, own) if self.choices is not None else None

    def drawn(self, place: Place, slot: str, p: float, digest: str) -> None:
        """Note that elements are dropped."""
        self.info.draws.append(Draw(self._step, place.call, place.name, slot, p, digest, place.again))

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no operation of the program."""
        return self.ops.paused() if self.ops is not None else contextlib.nullcontext()

    def fail(self, error: Exception) -> None:
        """Recording failed; the program goes on."""
        self._fail(error)

    # -- parameters, gradients, optimizers ------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for root in self._roots:
            for parameter in root.parameters():
                name = self.names.parameters.get(id(parameter))
                if name is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _record_parameters(self, kind: str, wanted: Callable[[str], bool]) -> None:
        for name, parameter in self._parameters():
            if hasattr(parameter, "placements"):
                self._sharded.add(name)
            if wanted(name):
                self._record(parameter, call=0, kind=kind, meta=self._owner(name), slot="")

    def _record_after(self) -> None:
        """Parameters as the next step finds them; DTensors were recorded when their optimizer had stepped."""
        self._record_parameters("param_after", lambda n: n not in self._after and n not in self._sharded)

    def _owner(self, name: str) -> tuple[str, str, str]:
        path = name.rpartition(".")[0]
        for module in self._owners().get(path, ()):
            return name, type(module).__name__, source_of(module) if not is_torch_module(module) else ""
        return name, "", ""

    def _owners(self) -> dict[str, list[nn.Module]]:
        if not hasattr(self, "_owner_table"):
            table: dict[str, list[nn.Module]] = {}
            for root in self._roots:
                for module in root.modules():
                    name = self.names.modules.get(id(module))
                    if name is not None and module is unwrapped(module):
                        table.setdefault(name, []).append(module)
            self._owner_table = table
        return self._owner_table

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._over or not self._begun or self.writer is None:
            return
        self._flatten_foreign(optimizer)
        if self.replayed is not None and self._step == 0:
            self.replayed.before_update(optimizer, self.names.parameters)
        for group in optimizer.param_groups:
            self.info.groups.append(settings.group_of(self._step, optimizer, group, self._held_by))
            for tensor in group["params"]:
                if id(tensor) in self._foreign:
                    self._record_spans(tensor, tensor.grad, "main_grad", "")
                    continue
                name = self.names.parameters.get(id(tensor))
                if name is None or (self._step, name) in self._taken:
                    continue
                grad = next((g for a in _GRADS if (g := getattr(tensor, a, None)) is not None), None)
                if grad is not None:
                    self._taken.add((self._step, name))
                    self._record(grad, call=0, kind="main_grad", meta=self._owner(name), slot="")
        if self.force is not None:
            self._force_gradients(optimizer, self.force)
        if self.config.noise is not None:
            self._restores.append(shaken(optimizer, self.config.noise))

    def _force_gradients(self, optimizer: Any, force: Forced) -> None:
        """Give the optimizer the reference's gradients, so that its update is judged alone."""
        with torch.no_grad():
            for tensor in (t for group in optimizer.param_groups for t in group["params"]):
                grad = next((g for a in _GRADS if (g := getattr(tensor, a, None)) is not None), None)
                if grad is None:
                    continue
                local = local_of(grad)
                name = self.names.parameters.get(id(tensor))
                if id(tensor) in self._foreign:
                    for span in self._spans.get(id(tensor), []):
                        part = force.gradient(self._step, span.name)
                        if part is not None and part.numel() >= span.stop:
                            values = part[span.start : span.stop].to(device=local.device, dtype=local.dtype)
                            local.view(-1)[span.at : span.at + values.numel()] = values
                elif name is not None:
                    whole = force.gradient(self._step, name)
                    if whole is not None and whole.numel() == local.numel():
                        local.copy_(whole.view(local.shape))

    def _flatten_foreign(self, optimizer: Any) -> None:
        """Find out which elements of parameters an optimizer's own flat tensors hold; once, before the first update."""
        strangers = [
            t
            for g in optimizer.param_groups
            for t in g["params"]
            if id(t) not in self.names.parameters and id(t) not in self._foreign and torch.is_floating_point(t)
        ]
        if not strangers:
            return
        values = {n: local_of(p.detach()).float().flatten().cpu().numpy() for n, p in self._parameters()}
        flats = [local_of(t.detach()).float().flatten().cpu().numpy() for t in strangers]
        grads = spans.Gradients(
            [_flat_gradient(t) for t in strangers],
            {n: g for n, p in self._parameters() if (g := _flat_gradient(p)) is not None and g.shape == values[n].shape},
        )
        for tensor, found in zip(strangers, spans.find_spans(flats, values, grads), strict=True):
            self._foreign[id(tensor)] = tensor
            self._spans[id(tensor)] = found

    def _record_spans(self, tensor: Any, value: Any, kind: str, slot: str) -> None:
        if value is None:
            return
        flat = local_of(value.detach()).flatten()
        for span in self._spans.get(id(tensor), []):
            part = flat[span.at : span.at + span.stop - span.start]
            self._record(part, call=0, kind=kind, meta=self._owner(span.name), slot=slot, span=(span.start, span.stop))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._over or not self._begun or self.writer is None:
            return
        self._stepped = True
        if self._restores:
            self._restores.pop()()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) in self._foreign:
                    self._record_spans(tensor, tensor, "opt_state", "master")
                state = optimizer.state.get(tensor, {}) if hasattr(optimizer.state, "get") else {}
                name = self.names.parameters.get(id(tensor))
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != tensor.numel():
                        continue
                    if value.numel() == 1 and key == "step":
                        continue
                    if id(tensor) in self._foreign:
                        self._record_spans(tensor, value, "opt_state", str(key))
                    elif name is not None:
                        self._record(value, call=0, kind="opt_state", meta=self._owner(name), slot=str(key))
                if name in self._sharded and name not in self._after:
                    self._after.add(name)
                    self._record(tensor, call=0, kind="param_after", meta=self._owner(name), slot="")

    # -- numbers --------------------------------------------------------------------------------------------

    def _loss(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if recomputing():
            return
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.is_floating_point():
                self._scalar("loss", root, call=self._losses)
                self._losses += 1

    def _scalar(self, name: str, value: Any, *, call: int = 0) -> Any:
        """Record a number; returns it, of a DTensor the whole."""
        full = value.full_tensor() if hasattr(value, "full_tensor") and name != "loss" else value
        self._record(full.detach().reshape(()), call=call, kind="scalar", meta=(name, "", ""), slot="")
        return full

    def _record(
        self,
        tensor: Any,
        *,
        call: int,
        kind: str,
        meta: tuple[str, str, str],
        slot: str,
        recompute: bool = False,
        span: tuple[int, int] | None = None,
    ) -> None:
        if self.writer is None or (self.ops is not None and kind != "op"):
            return
        placement = _placement(tensor)
        local = local_of(tensor.detach() if hasattr(tensor, "detach") else tensor)
        dtype = _DTYPES.get(local.dtype)
        if dtype is None:
            return
        kept = local.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()
        name, cls, source = meta
        self.writer.add(
            kept,
            dtype=dtype,
            size=kept.numel() * kept.element_size(),
            step=self._step,
            call=call,
            kind=kind,
            name=name,
            slot=slot,
            cls=cls,
            source=source,
            placement=placement,
            span=span,
            recompute=recompute,
            fp8=name in self._fp8,
        )


def _flat_gradient(tensor: Any) -> Any:
    grad = next((g for a in _GRADS if (g := getattr(tensor, a, None)) is not None), None)
    return None if grad is None else local_of(grad.detach()).float().flatten().cpu().numpy()


def _meta(name: str, module: nn.Module) -> tuple[str, str, str]:
    return name, type(module).__name__, source_of(module) if not is_torch_module(module) else ""


def _named(values: Any, side: str) -> dict[str, torch.Tensor]:
    """The tensors that cross an edge, by place."""
    leaves = pytree.tree_leaves(values)
    return {s: x for s, x in zip(_slots(values, leaves, side), leaves, strict=True) if isinstance(x, torch.Tensor)}


def _slots(values: Any, leaves: list[Any], side: str) -> list[str]:
    """What each leaf is called: `""` for a lone positional tensor, else its path."""
    paths = [pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(values)[0]]
    if side == "output":
        return [_tidy(p) for p in paths]
    tidy = []
    for path in paths:  # values is (args, kwargs)
        rest = path[3:] if path.startswith(("[0]", "[1]")) else path
        tidy.append(_tidy(rest))
    lone = sum(isinstance(x, torch.Tensor) for x in leaves) == 1
    return ["" if lone and t == "0" else t for t in tidy]


def _tidy(path: str) -> str:
    text = path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return text.strip(".")


def _placement(tensor: Any) -> dict[str, Any] | None:
    if not hasattr(tensor, "placements") or not hasattr(tensor, "device_mesh"):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"mesh{i}" for i in range(mesh.ndim))
    return {
        "axes": list(names),
        "sizes": [int(s) for s in mesh.mesh.shape],
        "placements": [str(p) for p in tensor.placements],
        "shape": [int(s) for s in tensor.shape],
    }
