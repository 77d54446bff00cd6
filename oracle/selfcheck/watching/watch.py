"""In the program's process: sees calls of models, losses, backward passes and updates, and makes copies of one step for relations.

Life of a watched process: `install` at the end of `import torch`; the first training call of a root module (the model is not yet trained: `resume.Fresh`
waits there in a fork); `CheckConfig.step` updates; before the next one each relation is checked in a fork of its own; the results are
written; everything is taken off. Values of the program are never changed: loss and parameters are the same bits with and without.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

from proctor.instrument.guard import say
from proctor.instrument.observe.casts import autocast_dtype, autocast_enabled
from proctor.instrument.observe.mesh import position
from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.selfcheck import adapters
from proctor.oracle.selfcheck.facts import FAILED, WAITS, CheckConfig
from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.parting import program_stack
from proctor.oracle.selfcheck.watching.seen.entered import entered, unwrapped
from proctor.oracle.selfcheck.watching.seen.losses import Losses
from proctor.oracle.selfcheck.watching.seen.moved import Moved
from proctor.oracle.selfcheck.watching.seen.pairs import Pairs
from proctor.oracle.selfcheck.watching.seen.recomputed import CHECKPOINTS, maybe_checkpoint
from proctor.oracle.selfcheck.watching.step import Backward, Call, Update
from proctor.oracle.selfcheck.watching.undropped import undropped
from proctor.oracle.selfcheck.watching.values import detached, tensors

MAX_CALLS: Final = 12  # of one module in an update whose batches are kept
MAX_LOADERS: Final = 4
LATER_S: Final = 10.0  # an actor makes all its updates before the critic's first, five of a critic come before one of the generator
MAX_BATCH_BYTES: Final = 1 << 30


class Watch:
    """Everything that is seen of one process.

    Args:
        config: what to do.
    """

    def __init__(self, config: CheckConfig) -> None:
        self.config = config
        self.calls: list[Call] = []
        self.backwards: list[Backward] = []
        self.losses = Losses(lambda: len(self.backwards), self.guarded)
        self.pairs = Pairs(self.guarded, lambda: self._outermost if self._depth else None)
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []
        self.moved = Moved()
        self.called: set[int] = set()
        self.roots: dict[int, nn.Module] = {}
        self.steps: dict[int, int] = {}
        self.checkpointed = False
        self.over = False
        self.ours = False  # what runs is a check
        self.digests: Any = None
        self.fresh: Any = None
        self.saving: Any = None
        self.step_s = 0.0
        self._depth = 0
        self._outermost: Any = None
        self._routed: set[int] = set()  # models whose forward is called by its name
        self._since = time.monotonic()
        self._attached = Replaced()
        self._checked = 0
        self._looked_at = 0.0  # when the first optimizer had its turn
        self._begun = False
        self._stale = False  # an optimizer has stepped: what comes now belongs to the next update

    # -- putting it there ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch what tells of models and updates."""
        import torch.optim.lr_scheduler
        import torch.utils.data
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        wrap = self._attached.wrap
        wrap(nn.Module, "__call__", self._called)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.optim.Optimizer, "__init__", self._noting(self.optimizers))
        wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", self._noting(self.schedulers))
        wrap(torch.utils.data.DataLoader, "__iter__", self._reads)
        wrap(checkpointing, "checkpoint", maybe_checkpoint)
        if self.config.rows:
            wrap(torch.nn.utils, "clip_grad_norm_", self._clips)
        if not self.config.digest and self.wanted("saved"):
            from proctor.oracle.selfcheck.watching.saves.saving import Saving

            self.saving = Saving(self)
            self.saving.install()
        self.losses.install()
        if not self.config.digest and self.wanted("paired"):
            self.pairs.install(self._attached)
        self._attached.hold(self.losses.remove)
        register_optimizer_step_pre_hook(self._updates)  # both stay, and do nothing once all is over: torch goes through its hooks when that is decided, and a hook that goes then ends the program
        register_optimizer_step_post_hook(self._updated)
        if self.config.seed is not None:
            from proctor.oracle.selfcheck.watching.step import seeded

            seeded(self.config.seed)

    def remove(self) -> None:
        """Take everything off."""
        self.over = True
        self._attached.remove()
        self.calls, self.backwards = [], []

    # -- what the program does ----------------------------------------------------------------------------------

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.over or torch.jit.is_tracing():
            return original(module, *args, **kwargs)
        self.called.add(id(module))
        seen = self.digests
        if self._depth or not torch.is_grad_enabled() or _recomputing():
            self._depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            if seen is not None:
                seen.output(module, result)
            return result
        made: list[Any] = []
        self.guarded(lambda: made.append(self._begin(module, args, kwargs)))()
        seen = self.digests
        if seen is not None and made and made[0] is not None:
            self.guarded(seen.given)(made[0].module, made[0].inputs)
        self._outermost = module
        self._depth += 1
        try:
            with undropped(module) if self.config.rows else contextlib.nullcontext():
                result = original(module, *args, **kwargs)
        finally:
            self._depth -= 1
        if made and made[0] is not None:
            self.guarded(self._end)(made[0], result)
        if seen is not None:
            seen.output(module, result)
        return result

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = unwrapped(module)
        if not any(p.requires_grad for p in module.parameters()):
            return None  # a metric, a loss: also after an update, where a trainer logs, before the next has begun
        self._renew()
        outer = entered(module)
        if outer is not None and id(outer) not in self._routed:
            self._routed.add(id(outer))
            self._attached.wrap(type(outer), "forward", self._forwards)  # of its class: a copy of a model is called by its own
            self.roots = {n: m for n, m in self.roots.items() if all(m is not part for part in outer.modules())}
            self.roots[id(outer)] = outer
        if outer is None:
            self.roots.setdefault(id(module), module)
        if not self._begun:
            self._begun = True
            self._start()
        if sum(c.module is module for c in self.calls) >= MAX_CALLS or sum(t.numel() * t.element_size() for _, t in tensors((args, kwargs))) > MAX_BATCH_BYTES:
            return None
        device = next(module.parameters()).device.type
        cast = autocast_dtype(device) if autocast_enabled(device) else None
        call = Call(module, self._name(module), detached(args), detached(kwargs), random_states(), module.training, cast)
        call.loader_batch = int(getattr(self.loaders[-1], "batch_size", 0) or 0) if self.loaders else 0
        return call

    def _forwards(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A `forward` that the program calls by its name, as a call of the module."""
        if self._depth or id(module) not in self._routed:
            return original(module, *args, **kwargs)
        return self._called(original, module, *args, **kwargs)

    def _end(self, call: Call, result: Any) -> None:
        """A root module returned: what comes back to its results is kept."""
        self.calls.append(call)
        for path, tensor in tensors(result):
            call.results[path] = (tuple(tensor.shape), tensor.dtype)
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self.guarded(functools.partial(self._returned, call, path)))

    def _returned(self, call: Call, path: str, grad: torch.Tensor | None) -> None:
        if not self.over and grad is not None:  # DDP that looks for unused parameters hands on none where nothing came back
            known = call.gradients.get(path)
            call.gradients[path] = grad.detach().clone() if known is None else known + grad.detach()

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.over:
            self._renew()
            self.backwards.append(Backward(program_stack()))
        result = original(*args, **kwargs)
        if not self.over:
            self.guarded(self.moved.gave)(self.optimizers)
        return result

    def _reads(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.over and loader not in self.loaders[-1:]:
            self.loaders = [*[x for x in self.loaders if x is not loader][-MAX_LOADERS:], loader]
        return original(loader, *args, **kwargs)

    def _clips(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if self.digests is not None:
            self.guarded(self.digests.clipped)(norm)
        return norm

    def _noting(self, known: list[Any]) -> Callable[..., Any]:
        def around(original: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(item, *args, **kwargs)
            if not self.over and all(item is not k for k in known):
                known.append(item)
            return result

        return around

    # -- updates ------------------------------------------------------------------------------------------------

    def _updates(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before an optimizer steps; with a closure, when that has computed the gradients for the first time."""
        if self.over:
            return None
        look = self.guarded(self._look)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            look(optimizer)
            return None
        times: list[bool] = []

        @functools.wraps(closure)
        def seen() -> Any:
            loss = closure()
            if not times and not self.over:
                look(optimizer)
            times.append(True)
            return loss

        return ((args[0], seen, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": seen})

    def _look(self, optimizer: Any) -> None:
        if getattr(optimizer, "_optim_dict", None) is not None or _inner(optimizer, self.optimizers):
            return  # a wrapper whose own optimizer steps as well
        number = self.steps.get(id(optimizer), -1) + 1
        self.steps[id(optimizer)] = number
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.moved.look(parameter)
        if self.digests is not None:
            self.digests.update(optimizer, number)
        if not self.config.digest and number == self.config.step and self.backwards:
            from proctor.oracle.selfcheck.watching.conduct import conduct

            update = self._update(optimizer, number)
            with self.paused():
                conduct(self, update)
            self._checked += 1
            self._looked_at = self._looked_at or time.monotonic()
        if self._checked or (self.config.digest and number >= self.config.step):
            self._finish_if_all(number)

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After it: what comes now belongs to the next update."""
        if self.over:
            return
        now = time.monotonic()
        self.step_s, self._since = now - self._since, now
        self._stale = True

    def _renew(self) -> None:
        if self._stale:
            self._stale = False
            self.calls, self.backwards = [], []
            self.losses.begin()
            self.pairs.begin()

    def _finish_if_all(self, number: int) -> None:
        """End when every optimizer had its turn, or this one is two updates further and enough time has passed for the others to begin."""
        wrapped = {id(getattr(o, "optimizer", None)) for o in self.optimizers}
        known = [id(o) for o in self.optimizers if self._looked_at and id(o) not in wrapped] or list(self.steps)
        late = time.monotonic() - self._looked_at > LATER_S
        if all(self.steps.get(k, -1) >= self.config.step for k in known) or (late and number >= self.config.step + 2):
            if self.saving is not None and self.saving.expected():
                (self.folder / WAITS).touch()
            self._write_done()
            self.remove()

    def _update(self, optimizer: Any, number: int) -> Update:
        held = {id(p) for g in optimizer.param_groups for p in g["params"]}
        calls = [c for c in self.calls if any(id(p) in held for p in c.module.parameters())]
        for call in calls:
            call.step = number
            call.targets = [c.targets for c in self.losses.criteria if c.targets is not None]
        models = [m for m in self.roots.values() if any(id(p) in held for p in m.parameters())]
        return Update(
            optimizer, type(optimizer).__name__, number, calls, list(self.losses.criteria), list(self.backwards), dict(self.moved.graded), frozenset(self.called),
            models, list(self.optimizers), list(self.schedulers), list(self.loaders), self.checkpointed or bool(CHECKPOINTS["used"]), int(position()["world"]), list(self.pairs.crossed), self.pairs.met, dict(self.moved.by_hand), dict(self.moved.taken),
        )  # fmt: skip

    # -- beginning and end --------------------------------------------------------------------------------------

    def _start(self) -> None:
        where = position()
        self.folder = Path(self.config.folder) / f"rank{where['rank']}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "begun").touch()
        if self.config.digest:
            from proctor.oracle.selfcheck.watching.digests import Digests

            self.digests = Digests(self.folder, self)
        elif self.wanted("resume"):
            from proctor.oracle.selfcheck.watching.resume import Fresh

            with self.paused():
                self.fresh = Fresh.wait(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, what runs is ours."""
        before, self.over, self.ours = self.over, True, True
        try:
            yield
        finally:
            self.over, self.ours = before, False

    def wanted(self, name: str) -> bool:
        """Whether a relation was asked for."""
        return (not self.config.only or name in self.config.only) and name not in self.config.skip

    def _write_done(self) -> None:
        if self.digests is not None:
            self.digests.close()
        (self.folder / "done").touch()

    def _name(self, module: nn.Module) -> str:
        """Its class, with a number if there are several roots of it."""
        alike = [m for m in self.roots.values() if type(m) is type(module)]
        at = next((i for i, m in enumerate(alike) if m is module), len(alike))
        return type(module).__name__ + (f"#{at + 1}" if at else "")

    def guarded(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The same function without its result and its errors: nothing of ours may reach the program."""

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - the program goes on
                self.fail(e)

        return run

    def fail(self, error: Exception) -> None:
        """Say that watching failed, once, and take everything off."""
        import os

        if self.over:
            return
        if os.environ.get("PROCTOR_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        said = f"{type(error).__name__}: {str(error)[:200]}"
        say(f"self: not checking: {said}")
        if self._begun:
            (self.folder / FAILED).write_text(said, encoding="utf-8")
        self.remove()


def install_from(activation: str) -> None:
    """Begin to watch this process, as the file says; called by the start-up hook."""
    config = msgspec.json.decode(Path(activation).read_bytes(), type=CheckConfig)
    Watch(config).install()
    if not config.digest:
        adapters.install()


def _recomputing() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


def _inner(optimizer: Any, known: list[Any]) -> bool:
    """Whether it wraps another optimizer of the program, whose own step is seen as well."""
    inner = getattr(optimizer, "optimizer", None)
    return isinstance(inner, torch.optim.Optimizer) and any(inner is k for k in known)
