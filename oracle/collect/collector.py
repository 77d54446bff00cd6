"""Records one process of a run: what crosses the edges of modules, parameters and gradients of the first steps.

Nothing is asked of the user's code. Models are found when the first of them is called for training; their modules get
a tap at input and output (`crossings.py`). A step begins with the first training forward after an optimizer's step (or
after gradients were cleared following a backward pass). Parameters, gradients and the state of optimizers are read when
an optimizer steps (`optimizers.py`).

After `steps` steps everything is taken off again and the process goes on as if nothing had been there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import wrapt
from torch import nn

from proctor.oracle.collect import settings
from proctor.oracle.collect.attached import Attached
from proctor.oracle.collect.buffers import Buffers
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.collect.crossings import Crossings
from proctor.oracle.collect.decisions import Decisions
from proctor.oracle.collect.flats import Flats
from proctor.oracle.collect.forced import Supplied
from proctor.oracle.collect.forwards import Forwards
from proctor.oracle.collect.guard import Guard
from proctor.oracle.collect.models import Models
from proctor.oracle.collect.optimizers import Optimizers, asked_for
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.regions import Regions, anything_compiled, skip_frames
from proctor.oracle.collect.replayed import Replayed
from proctor.oracle.collect.roots import in_flat_tensors
from proctor.oracle.collect.running import Place, Running
from proctor.oracle.collect.tape import Tape
from proctor.oracle.collect.taps import recomputing
from proctor.oracle.frameworks import framework_of
from proctor.oracle.recording.store import EVALUATION, Draw

if TYPE_CHECKING:
    from proctor.oracle.collect.keyed import KeyedDraws


class Collector:
    """Everything that watches one process of a run.

    Args:
        config: what to record and where.

    Attributes:
        info: what is said of the process.
        models: those that train.
        optimizers: of the process.
        progress: where the run is.
    """

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.progress = Progress()
        self.models = Models()
        self.regions = Regions(config.compiled)
        self._tape = Tape(self.progress, config.fp8, config.whole, statistics=config.statistics)
        self.info = self._tape.info
        self._attached = Attached()
        self._guard = Guard(self._failed, compiled=self.regions.on)
        self._guarded = self._guard.guarded
        self._supplied = Supplied()
        self._replayed = Replayed(config.replay) if config.replay else None
        self._keyed = self._make_keyed() if config.dropout == "keyed" else None
        self._decisions = Decisions(self, "draw" if config.replay else config.dropout, self._keyed)
        self.optimizers = Optimizers(self.models, self.progress, self._tape, self._supplied, self._replayed, config.noise)
        self._buffers = Buffers(self.models, self._tape)
        self._crossings = Crossings(
            config,
            progress=self.progress,
            tape=self._tape,
            supplied=self._supplied,
            regions=self.regions,
            guard=self._guard,
            next_step=self._next_step,
        )
        self._attached.hold(self._crossings.close)
        self._forwards = Forwards(self) if config.forward else None
        self._losses = 0
        self._hidden = False  # the model's forward is compiled as a part of something else
        if self.regions.on:
            skip_frames(Collector, Attached, Buffers, Crossings, Flats, Guard, Models, Optimizers, Progress, Running, Supplied, Tape)

    # -- putting it there -----------------------------------------------------------------------------------

    def _make_keyed(self) -> KeyedDraws:
        from proctor.oracle.collect.keyed import KeyedDraws  # late: most recordings draw as they would

        keyed = KeyedDraws(lambda: self._crossings.running.all() if self.recording() else (), lambda: self.progress.step, self._failed)
        self._attached.hold(keyed.close)
        return keyed

    def install(self) -> None:
        """Patch what tells of models and steps; everything else waits for the first training forward."""
        wrap = self._attached.wrap
        wrap(nn.Module, "__init__", self._constructed)
        wrap(nn.Module, "__setstate__", self._copied)
        wrap(nn.Module, "__call__", self._called)
        wrap(torch.autograd, "backward", self._backwards)
        self._decisions.install(wrap)
        for module in (nn.utils, nn.utils.clip_grad):
            wrap(module, "clip_grad_norm_", self._clipped)
            if hasattr(module, "clip_grads_with_norm_"):  # torch 2.6: by a norm that the program put together
                wrap(module, "clip_grads_with_norm_", self._scaled)
        wrap(torch.optim.Optimizer, "zero_grad", self._zeroed)
        wrap(nn.Module, "zero_grad", self._zeroed_by_hand)
        wrap(torch.optim.Optimizer, "__init__", self._made_optimizer)
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        for handle in (
            register_optimizer_step_pre_hook(self._guarded(self._before_update)),
            register_optimizer_step_pre_hook(self.optimizers.asking(self._guarded(self.optimizers.record_gradients))),
            register_optimizer_step_post_hook(self._guarded(self._after_update)),
        ):
            self._attached.hold(handle.remove)
        if self.config.watch_fp8:
            wrap(torch.Tensor, "to", self._converted)
        wrapt.register_post_import_hook(self._guarded(self._find_trials), "torch.distributed.pipelining.stage")
        if self._replayed is not None:
            self._replayed.install(wrap, lambda: not (self._inside() or self.progress.over or self.progress.boundary))
        at_exit = self._guarded(self._at_exit)
        atexit.register(at_exit)
        self._attached.hold(lambda: atexit.unregister(at_exit))

    def adopt(self, models: Sequence[nn.Module]) -> None:
        """Take models, and optimizers, that were made before; the first model's modules have no prefix. After `install`."""
        for module in (m for model in models for m in model.modules()):
            self.models.modules.add(module)
        for model in models:
            if not self.models.knows(model):
                self._discover(model)
        self.optimizers.adopt()

    def end(self) -> None:
        """Nothing more comes: write what there is, as at the end of the process."""
        self._guarded(self._at_exit)()
        self.progress.over = True
        self.remove()

    def abandon(self) -> None:
        """End without a recording that anybody would take for a whole one."""
        if not self.progress.over:
            self._finish(done=False)
        self.remove()

    def remove(self) -> None:
        """Take everything off; a process that goes on is the user's alone."""
        self._attached.remove()

    def _failed(self, why: str) -> None:
        self.info.notes.append(why)
        self._finish(done=False)

    # -- what the patches see: modules ----------------------------------------------------------------------

    def _constructed(self, original: Callable[..., None], module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self.models.modules.add(module)

    def _copied(self, original: Callable[..., None], module: nn.Module, /, state: Any) -> None:
        """A module is copied (stages and averages are made by `deepcopy`) or loaded: no constructor runs."""
        original(module, state)
        self.models.modules.add(module)

    def _inside(self) -> bool:
        """Whether a module of the user runs."""
        return self._crossings.running.depth > 0

    def _called(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        progress = self.progress
        if self._forwards is not None and not self._inside() and not progress.over and not recomputing():
            self._guarded(self._forwards.outermost)(module)
        elif not self._inside() and not progress.over and not progress.trial and torch.is_grad_enabled() and not recomputing():
            self._guarded(self._outermost)(module)
            if self._replayed is not None and progress.recording() and not progress.boundary:
                self._guarded(self._replayed.call)(args, kwargs)
            try:
                return self._deciding(original, module, *args, **kwargs)
            except BaseException:
                self._crossings.running.abandon()
                raise
        if self._evaluates(module):
            try:
                return self._deciding(original, module, *args, **kwargs)
            except BaseException:
                self._crossings.running.abandon()
                raise
        return self._crossings.call(original, module, *args, **kwargs)

    def _evaluates(self, module: nn.Module) -> bool:
        """Whether a forward without gradients begins, of a model that trains."""
        progress = self.progress
        if self._inside() or progress.trial or not progress.recording() or recomputing() or (torch.is_grad_enabled() and self._forwards is None):
            return False
        return self.models.knows(module)

    def _deciding(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """An outermost call, whose decisions are seen; in compiled code nothing of ours may stand, so only that it draws is."""
        if self.regions.on and torch.compiler.is_compiling():
            return self._crossings.call(original, module, *args, **kwargs)
        if not self.regions.names:
            return self._decisions.around(self._crossings.call, original, module, *args, **kwargs)
        before = torch.random.default_generator.get_state()
        output = self._crossings.call(original, module, *args, **kwargs)
        self.info.random |= not torch.equal(before, torch.random.default_generator.get_state())
        return output

    def _find_trials(self, stages: Any) -> None:
        """Pipeline stages first run forwards and backwards on empty tensors to learn shapes; that is no microbatch."""
        for cls in vars(stages).values():
            for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
                if not self.progress.over and isinstance(cls, type) and name in vars(cls):
                    self._attached.wrap(cls, name, self._on_trial)

    def _on_trial(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before, self.progress.trial = self.progress.trial, True
        try:
            return original(*args, **kwargs)
        finally:
            self.progress.trial = before

    def _converted(self, original: Callable[..., Any], tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self._crossings.casts_to_fp8()
        return result

    # -- what the patches see: backward passes and optimizers -----------------------------------------------

    def _backwards(self, original: Callable[..., Any], /, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        progress, ops = self.progress, self._crossings.ops
        if self._forwards is not None:
            return original(tensors, *args, **kwargs)
        if self.regions.on and not progress.over and not progress.trial and (self._hidden or not progress.begun):
            result = original(tensors, *args, **kwargs)
            self._guarded(self._hidden_backward)()
            return result
        if progress.recording():
            self._guarded(self._loss)(tensors)
            if self._replayed is not None:
                self._replayed.backward()
            self._computed_gradients()
            if ops is not None:
                with ops.backward():
                    return original(tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    def _hidden_backward(self) -> None:
        """Gradients came to parameters of a model whose call was never seen: a compiled function calls it."""
        self._hidden_update()
        if self._hidden and self.progress.stepped:
            self._next_step()
        if not self.progress.begun and anything_compiled():
            trained = [r for r in self.models.modules.roots() if any(p.grad is not None for p in r.parameters())]
            if not trained:
                return
            self._hidden = True
            self._discover(trained[0])
            self.regions.names.add(self.models.name_of(trained[0]))
            self._begin()
        if self.progress.begun:
            self._computed_gradients()

    def _computed_gradients(self) -> None:
        self.progress.backward = True
        self.optimizers.note_versions()

    def _hidden_update(self) -> None:
        """See whether an optimizer stepped within compiled code, where its hooks are not called."""
        if self.regions.on and self.progress.backward and not self.progress.stepped and anything_compiled():
            self.optimizers.updated_unseen()

    def _loss(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if recomputing():
            return
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.is_floating_point():
                self._tape.scalar("loss", root, call=self._losses)
                self._losses += 1

    def _made_optimizer(self, original: Callable[..., None], optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self.optimizers.add(optimizer)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.progress.stepping.add(id(optimizer))
        if self._forwards is None:
            self.optimizers.before_update(optimizer, asks=asked_for(args, kwargs) is not None)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.progress.stepping.discard(id(optimizer))
        if self._forwards is None:
            self.optimizers.after_update(optimizer)

    def _updated_by_hand(self) -> None:
        """See whether the program has moved parameters itself, without an optimizer."""
        if self.progress.recording() and self._tape.running() and self._forwards is None:
            self.optimizers.updated_by_hand()

    def _zeroed_by_hand(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._updated_by_hand)()
        return original(*args, **kwargs)

    def _zeroed(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.progress.backward and not self.progress.stepping:
            if self.regions.on:
                self._guarded(self._hidden_update)()
            self.progress.cleared = True
        return original(*args, **kwargs)

    def _clipped(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._unclipped(args, kwargs)
        norm = original(*args, **kwargs)
        if self.progress.recording() and self._forwards is None and isinstance(norm, torch.Tensor):
            self._guarded(self.optimizers.after_clipping)(norm, args, kwargs)
        return norm

    def _scaled(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._unclipped(args, kwargs)
        return original(*args, **kwargs)

    def _unclipped(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gradients are about to be clipped; returns the arguments, of which nothing is read up."""
        if self.progress.recording() and self._forwards is None:
            args, kwargs = settings.listed(args, kwargs)
            self._guarded(self.optimizers.before_clipping)(args[0] if args else kwargs.get("parameters"))
        return args, kwargs

    # -- forwards alone -------------------------------------------------------------------------------------

    def begin_with(self, module: nn.Module) -> None:
        """A model runs for the first time, in a program that is looked at for its forwards."""
        if any(True for _ in module.parameters()):
            self._discover(module)
            self._begin()

    def synchronised(self) -> None:
        """The weights are other ones than in the forward before."""
        self._count_evaluations()
        self.progress.advance()
        self._crossings.next_step()
        self._decisions.next_step()
        if self.progress.step >= self.config.steps:
            self._finish(done=True)
        else:
            self.optimizers.record_before()
            self._tape.flush()

    # -- steps ----------------------------------------------------------------------------------------------

    def _outermost(self, module: nn.Module) -> None:
        """A module is called that no other module called."""
        if not self.models.knows(module):
            if not any(p.requires_grad for p in module.parameters()) and not self.progress.begun:
                return  # not training yet
            self._discover(module)
        self._hidden_update()
        self._updated_by_hand()
        if not self.progress.begun:
            self._begin()
        elif self.progress.complete():
            if not self.progress.stepped and self.optimizers.tried():
                self.progress.cleared = False
            else:
                self.progress.boundary = True

    def _discover(self, called: nn.Module) -> None:
        """Watch the modules of models that were not known."""
        for root, fresh, left_out in self.models.discover(called):
            hidden, regions = self.regions.inside(root), {id(m) for m in self.regions.calls(root)}
            for name, module in fresh:
                if id(module) in hidden:
                    self._crossings.edge(name, module, left_out.get(name, frozenset()), compiled=False)
                elif id(module) not in regions:
                    self._attached.hold(*self._crossings.hook(name, module, left_out.get(name, frozenset())))
            self._add_regions(root, left_out)

    def _add_regions(self, root: nn.Module, left_out: Mapping[str, frozenset[str]]) -> None:
        for module in self.regions.calls(root):
            name = self.models.name_of(module)
            self._crossings.edge(name, module, left_out.get(name, frozenset()), compiled=True)
        self.regions.names.update(self.models.names.modules.get(id(m), "") for m in self.regions.with_forward(root))

    def _begin(self) -> None:
        self.progress.begun = True
        self._identify()
        try:
            self._tape.open(Path(self.config.folder) / f"rank{self.info.rank}")
        except FileExistsError:
            self.progress.over = True  # another process of this rank came first (an evaluation, a second job of a script)
            self.remove()
            return
        if any(map(in_flat_tensors, self.models.roots)):
            self._failed("FullyShardedDataParallel (FSDP1) keeps parameters in flat tensors, which the oracle cannot read; use fully_shard (FSDP2)")
            return
        self.models.rename_parameters()
        chunks = [r for r in self.models.roots if framework_of(r) is not None]
        if chunks and not self.config.plan and (known := framework_of(chunks[0])) is not None:
            self.info.plan = known.plan_of(chunks).to_json().decode()
        if self.config.generate is not None:
            self.optimizers.overwrite(functools.partial(self._generate, self.config.generate))
        if self._replayed is not None:
            self.optimizers.overwrite(functools.partial(self._replayed.begin, self.models))
        self.optimizers.record_before()
        self._buffers.record_before()
        self._supplied.read(self.config, self.info.rank)
        if self._keyed is not None:
            self._keyed.open(self.config.plan or self.info.plan, self.info.rank, self.info.world)
        if self.info.rank in self.config.ops:
            self._crossings.record_operations(self.config.ops[self.info.rank], self.config.ops_step)

    def _identify(self) -> None:
        dist = torch.distributed
        rank, world = int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        from proctor.instrument.observe.mesh import position

        self.info.rank, self.info.world = rank, world
        self.info.coords = dict(position()["coords"])

    def _generate(self, seed: int) -> None:
        from proctor.oracle.recording.generate import generate_parameters

        plan = self.config.plan or self.info.plan
        self.info.notes += generate_parameters(self.models.parameters(), seed, plan, self.info.rank, self.info.world)

    def _next_step(self) -> None:
        if not self.progress.stepped:
            self.info.notes.append(f"step {self.progress.step}: gradients were cleared without an optimizer's step")
        self.optimizers.record_after()
        self._buffers.record_after()
        self._count_evaluations()
        self.progress.advance()
        self._crossings.next_step()
        self.optimizers.next_step()
        self._decisions.next_step()
        self._losses = 0
        if self.progress.step >= self.config.steps and (self.info.evaluated or not self.config.until_evaluation):
            self._finish(done=True)
        elif self.progress.step >= self.config.steps:
            self._tape.waits = True
        else:
            self._tape.flush()

    def _count_evaluations(self) -> None:
        if counts := self._crossings.evaluated():
            self.info.evaluated[self.progress.step] = counts

    def _at_exit(self) -> None:
        if self.progress.recording():
            self._hidden_update()
            self._updated_by_hand()
            # Behind a gradient that no optimizer took there may be an exception: whoever knows the exit code tells.
            self.info.open = self.progress.backward and not self.progress.stepped
            if self._forwards is not None:
                self._count_evaluations()
                self.progress.step += 1
            if self.progress.stepped or self.progress.backward:
                self.optimizers.record_after()
                self._buffers.record_after()
                self._count_evaluations()
                self.progress.step += 1
            self._finish(done=True)

    def _finish(self, *, done: bool) -> None:
        self.progress.over = True
        self.remove()
        self.info.steps, self.info.done = self.progress.step, done
        self.info.groups = [g for g in self.info.groups if g.step < self.config.steps]
        self.info.clips = [c for c in self.info.clips if c.step < self.config.steps]
        self.info.fp8 = sorted(self._tape.fp8)
        self.info.busy = self._crossings.busy()
        self.info.compiled = sorted(self.regions.names)
        self._tape.close([part.close for part in (self._replayed, self._crossings.ops) if part is not None])
        self.optimizers.close()

    # -- what decisions ask ---------------------------------------------------------------------------------

    def recording(self) -> bool:
        """Whether a step is being recorded."""
        return self.progress.recording() and not self.progress.trial and self._tape.running()

    def place(self) -> Place | None:
        """The innermost module that runs; of those that are computed again, only while a backward pass is running."""
        return self._crossings.running.innermost()

    def keep(self, tensor: torch.Tensor, kind: str, place: Place, slot: str) -> None:
        """Record what a module chose, and by what."""
        self._crossings.keep(tensor, kind, place, slot)

    def told(self, place: Place, kind: str, slot: str, own: torch.Tensor) -> torch.Tensor | None:
        """The reference's choice, or mask, in the place of a module's own."""
        choices = self._supplied.choices if not place.evaluation else None
        return choices(self.progress.step, kind, place.name, slot, place.call, own) if choices is not None else None

    def drawn(self, place: Place, slot: str, p: float, digest: str, shape: tuple[int, ...], begins: str) -> None:
        """Note that elements are dropped."""
        if self._tape.waits and not place.evaluation:
            return
        phase = EVALUATION if place.evaluation else ""
        self.info.draws.append(Draw(self.progress.step, place.call, place.name, slot, p, digest, place.again, phase, shape, begins))

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no operation of the program."""
        return self._crossings.paused()

    def fail(self, error: Exception) -> None:
        """Recording failed; the program goes on."""
        self._guard.fail(error)
