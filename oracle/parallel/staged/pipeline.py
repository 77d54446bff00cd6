"""Stages of a pipeline, for a model that knows nothing of them.

Every rank runs the model's own forward. A module of another stage is a ghost: it computes nothing, holds no parameters, and gives
tensors of the right shapes that belong to the graph. Where a unit of one stage follows a unit of another, the rank of the former
sends what goes into it, the rank of the latter takes that in the place of what its ghosts gave; gradients go back the same way
when autograd comes past. Rows of the inputs are split into microbatches that go through one after the other; a rank sends and goes
on with the next, so stages work at the same time (GPipe; `schedules` for 1F1B). Outputs are the last stage's on every rank: the script is that
of one device. With more stages than ranks, rank r has stages r, r + n, …; it then waits for the others within each microbatch.
A parameter that modules of several ranks share (an embedding that is the head) is held by each of them, and its gradients are summed.

In the first forward ghosts give NaN: where that reaches a stage, the model takes something from an earlier stage than the one before,
which is refused. Not built: recomputation.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.crossing.edges import changed
from proctor.oracle.parallel.staged import schedules
from proctor.oracle.parallel.staged.tied import tied_of
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.rules import PipelineRule

_MOST: Final = 32  # floating-point tensors that go into a unit
_UNITS: Final = 4096
_SAID: Final = 4096  # bytes that say how a unit's output looks
Told = Any  # nested shapes, as JSON has them


def units_of(model: torch.nn.Module, rule: PipelineRule) -> dict[str, int]:
    """Stages of the outermost modules that a pattern matches."""
    found: dict[str, int] = {}
    for path, _ in model.named_modules():
        stage = next((i for i, pattern in enumerate(rule.stages) if compiled(pattern).fullmatch(path)), None)
        if stage is not None and unit_of(path, found) is None:
            found[path] = stage
    return found


def unit_of(name: str, units: Mapping[str, int]) -> str | None:
    """The unit that a module or parameter lies in."""
    parts = name.split(".")
    return next((path for n in range(len(parts), -1, -1) if (path := ".".join(parts[:n])) in units), None)


class Stages:
    """The pipeline of one model on one rank.

    Args:
        model: with all its parameters.
        rule: of the plan, held against the model by `verify`.
        comm: where this rank is.
    """

    def __init__(self, model: torch.nn.Module, rule: PipelineRule, comm: Comm) -> None:
        self.comm, self.axis, self.microbatches, self.schedule = comm, rule.axis, rule.microbatches, rule.schedule
        size = comm.mesh.size(rule.axis)
        self.alone = size == 1
        self.at = comm.mesh.index(rule.axis, comm.coords)
        # From here on a stage is the rank that has it.
        self.units = {path: stage % size for path, stage in units_of(model, rule).items()}
        self.ahead = 1 if len(rule.stages) > size else size - self.at
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        units = {name: unit_of(name, self.units) for name in names}
        self.tied = tied_of(model, {name: self.units[unit] for name, unit in units.items() if unit is not None})
        self._parameters: list[torch.nn.Parameter] = []
        self._quiet: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.anchor = torch.zeros((), requires_grad=True)  # what ghosts give belongs to the graph by it
        self.fill = float("nan")
        self._kinds = {name: value.dtype for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        self._shapes: dict[str, tuple[int, ...]] = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        self._known: dict[tuple[Any, ...], Told] = {}
        self._microbatch = self._boundary = 0
        self._previous: int | None = None

    def mine(self, name: str) -> bool:
        """Whether this rank holds a parameter or module."""
        unit = unit_of(name, self.units)
        return self.alone or unit is None or self.units[unit] == self.at

    # -- what a rank holds ----------------------------------------------------------------------------------

    def drop(self, model: torch.nn.Module) -> None:
        """Forget the parameters of other stages."""
        for path, module in model.named_modules():
            if not self.mine(path):
                for name in list(module._parameters):
                    module._parameters[name] = None

    def stand(self, model: torch.nn.Module, quiet: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Stand in the place of the units' forwards, and see to the state dict; `quiet` is for gradients that are not the script's yet."""
        self._parameters, self._quiet = [p for p in model.parameters() if p.requires_grad], quiet
        if self.alone:
            return
        for path in self.units:
            module = model.get_submodule(path)
            module.forward = self._unit(path, module.forward)
        model.register_state_dict_post_hook(lambda *args: self._gather(*args))  # torch marks the hook: no method
        model.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: self._leave_out(state, prefix))

    def _gather(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """The state dict of the whole model on every rank, in its order."""
        found: dict[str, Any] = {}
        for name, dtype in self._kinds.items():
            value = state.get(prefix + name)
            unit = unit_of(name, self.units)
            if unit is not None:
                own = value if self.units[unit] == self.at else None
                local = torch.zeros(self._shapes[name], dtype=dtype) if own is None else own.detach().cpu().contiguous()
                # As bytes: one stage has them, and a sum with zeros keeps them.
                flat = self.comm.all_reduce(local.reshape(-1).view(torch.uint8).clone(), (self.axis,))
                value = flat.view(dtype).view(self._shapes[name]) if own is None else own
            if value is not None:
                found[prefix + name] = value
        rest = {key: value for key, value in state.items() if key not in found}
        state.clear()
        state.update({**found, **rest})

    def _leave_out(self, state: dict[str, Any], prefix: str) -> None:
        for name in self._kinds:
            if not self.mine(name):
                state.pop(prefix + name, None)

    # -- a forward ------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward on all microbatches; tensors of the outputs are joined by rows, single numbers averaged.

        Raises:
            OracleError: rows do not divide, or the model takes something from a stage that is not the one before.
        """
        back = self.schedule == "1f1b" and torch.is_grad_enabled() and bool(self._parameters)
        if back:
            with self._quiet():
                gone = schedules.forward_and_back(self._each(forward, args, kwargs), self.microbatches, self.ahead, self._parameters, self.anchor)
            outputs = gone.outputs
        else:
            outputs = [one() for one in self._each(forward, args, kwargs)]
        if not self.alone:
            last = self._previous
            outputs = [changed(output, lambda _, tensor: self._joined(tensor, last)) for output in outputs]
            self.fill = 0.0
        merged = _merged(outputs)
        return schedules.handed_over(merged, gone, self._parameters) if back else merged

    def _each(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[], Any]]:
        for number, (one, more) in enumerate(self._split(args, kwargs)):
            self._microbatch, self._boundary, self._previous = number, 0, None
            yield functools.partial(forward, *one, **more)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        n = self.microbatches
        if n == 1:
            yield args, kwargs
            return
        rows = next((t.shape[0] for t in _tensors((args, kwargs)).values() if t.dim()), 0)
        if not rows or rows % n:
            raise OracleError(f"{rows} rows cannot be split into {n} microbatches")

        for i in range(n):
            def part(_: str, tensor: torch.Tensor, at: int = i * (rows // n)) -> torch.Tensor:
                return tensor.narrow(0, at, rows // n) if tensor.dim() and tensor.shape[0] == rows else tensor

            yield changed(args, part), changed(kwargs, part)

    def _joined(self, tensor: torch.Tensor, last: int | None) -> torch.Tensor:
        joined: torch.Tensor = _Join.apply(tensor, self, self.at == last)
        if self.fill != 0.0 and joined.is_floating_point() and bool(joined.isnan().any()):
            raise OracleError("the model's output is not a number on the last stage: it is NaN, or takes something from an earlier stage than the one before")
        return joined

    def _unit(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        stage = self.units[path]

        def run(*args: Any, **kwargs: Any) -> Any:
            if int(torch._C._current_graph_task_id()) != -1:
                raise OracleError(f"{path} computes again in a backward, which stages of a pipeline cannot", hint="leave out checkpointing, or the pipeline")
            before, self._previous = self._previous, stage
            crosses = before is not None and before != stage
            self._boundary += crosses
            tag = (self._microbatch * _UNITS + self._boundary) * _MOST if crosses else -1
            key = (path, *((p, tuple(t.shape)) for p, t in _tensors((args, kwargs)).items()))
            if stage != self.at:
                return self._ghost(path, key, (args, kwargs), stage if crosses and before == self.at else None, tag)
            if crosses:
                args, kwargs = self._arrived(path, args, kwargs, before, tag)
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled():
                output = changed(output, lambda _, t: t if t.requires_grad or not t.is_floating_point() else _Anchored.apply(self.anchor, t))
            if key not in self._known:
                self._known[key] = self._exchanged(json.dumps(_told(output, path)))
            return output

        return run

    def _exchanged(self, text: str) -> Told:
        """What the one rank that knows it says to all stages."""
        raw = text.encode()
        if len(raw) > _SAID:
            raise OracleError("a unit of a pipeline gives too many tensors")
        said = torch.zeros(_SAID, dtype=torch.uint8)
        if raw:
            said[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return json.loads(self.comm.all_reduce(said, (self.axis,)).numpy().tobytes().rstrip(b"\0"))

    def _ghost(self, path: str, key: tuple[Any, ...], given: Any, target: int | None, tag: int) -> Any:
        floats = self._floats(path, given)
        if target is not None and self.fill != 0.0 and any(bool(t.isnan().any()) for t in floats):
            raise OracleError(f"what goes into {path} is not a number: it is NaN, or comes from an earlier stage than the one before")
        if key not in self._known:
            if target is not None:  # its output is to be computed before anybody can say how it looks
                for i, tensor in enumerate(floats):
                    self.send(tensor, target, 2 * (tag + i))
            told = self._known[key] = self._exchanged("")
            sent = True
        else:
            told, sent = self._known[key], False
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        _of(told, lambda shape, dtype: shapes.append((shape, dtype)))
        made = iter(_Ghost.apply(self.anchor, self, (target, tag, sent), shapes, *floats))
        return _of(told, lambda shape, dtype: next(made))

    def _arrived(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], source: int | None, tag: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = (args, kwargs)
        made = iter(_Arrive.apply(self.anchor, self, source, tag, *self._floats(path, given)))
        found: tuple[tuple[Any, ...], dict[str, Any]] = changed(given, lambda _, t: next(made) if t.is_floating_point() else t)
        return found

    @staticmethod
    def _floats(path: str, given: Any) -> list[torch.Tensor]:
        found = [t for t in _tensors(given).values() if t.is_floating_point()]
        if len(found) >= _MOST:
            raise OracleError(f"{path}: more than {_MOST} tensors go into it")
        return found

    def send(self, tensor: torch.Tensor, stage: int, tag: int) -> None:
        """To the rank of another stage."""
        self.comm.send(tensor, self._rank(stage), tag)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int, tag: int) -> torch.Tensor:
        """From the rank of another stage."""
        return self.comm.receive(torch.empty(shape, dtype=dtype), self._rank(stage), tag)

    def _rank(self, stage: int) -> int:
        return self.comm.mesh.rank({**self.comm.coords, self.axis: stage})


class _Ghost(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Sends on what goes into a unit of the next stage, or nothing; its gradient is what comes back, or zeros."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stages: Stages, where: tuple[int | None, int, bool], shapes: Any, *floats: torch.Tensor) -> Any:
        ctx.stages, (ctx.target, ctx.tag, sent) = stages, where
        ctx.given = [(tuple(t.shape), t.dtype) for t in floats]
        if ctx.target is not None and not sent:
            for i, tensor in enumerate(floats):
                stages.send(tensor, ctx.target, 2 * (ctx.tag + i))
        return tuple(torch.full(shape, stages.fill if dtype.is_floating_point else 0, dtype=dtype) for shape, dtype in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def back(i: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if ctx.target is None:
                return torch.zeros(shape, dtype=dtype)
            received: torch.Tensor = ctx.stages.receive(shape, dtype, ctx.target, 2 * (ctx.tag + i) + 1)
            return received

        return _returned(ctx, back)


class _Arrive(torch.autograd.Function):  # type: ignore[misc]
    """Takes what the stage before sent; sends its gradients back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stages: Stages, source: int, tag: int, *floats: torch.Tensor) -> Any:
        ctx.stages, ctx.source, ctx.tag = stages, source, tag
        ctx.given = [(tuple(t.shape), t.dtype) for t in floats]
        return tuple(stages.receive(tuple(t.shape), t.dtype, source, 2 * (tag + i)) for i, t in enumerate(floats))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        def back(i: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            ctx.stages.send(gradients[i], ctx.source, 2 * (ctx.tag + i) + 1)
            return torch.zeros(shape, dtype=dtype)

        return _returned(ctx, back)


def _returned(ctx: Any, back: Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a function's four settings, none, and of each tensor that it was given and that wants one."""
    return None, None, None, None, *(back(i, *given) if ctx.needs_input_grad[4 + i] else None for i, given in enumerate(ctx.given))


class _Join(torch.autograd.Function):  # type: ignore[misc]
    """The last stage's tensor on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stages: Stages, last: bool) -> torch.Tensor:
        ctx.last = last
        own = tensor.detach().clone() if last else torch.zeros_like(tensor)
        kind = own.dtype
        joined = stages.comm.all_reduce(own.to(torch.uint8) if kind == torch.bool else own, (stages.axis,)).to(kind)
        if not kind.is_floating_point:
            ctx.mark_non_differentiable(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient if ctx.last else torch.zeros_like(gradient)), None, None


class _Anchored(torch.autograd.Function):  # type: ignore[misc]
    """A tensor that does not depend on a parameter, as its ghosts are: part of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None


def _tensors(value: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(path: str, tensor: torch.Tensor) -> torch.Tensor:
        found[path] = tensor
        return tensor

    changed(value, keep)
    return found


def _merged(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    parts = [_tensors(output) for output in outputs]

    def merge(path: str, tensor: torch.Tensor) -> torch.Tensor:
        every = [part[path] for part in parts]
        return torch.cat(every) if tensor.dim() else torch.stack(every).mean()

    return changed(outputs[0], merge)


def _told(value: Any, path: str) -> Told:
    """Shapes and types of what a unit gives."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {"each": [_told(one, path) for one in value], "tuple": type(value) is tuple}
    if type(value) is dict:
        return {"keys": {str(key): _told(one, path) for key, one in value.items()}}
    if value is None:
        return None
    raise OracleError(f"{path} gives {type(value).__name__}, which a stage cannot hand on", hint="take its parts as units")


def _of(told: Told, make: Callable[[tuple[int, ...], torch.dtype], Any]) -> Any:
    """A value that looks as told."""
    if told is None:
        return None
    if "shape" in told:
        return make(tuple(told["shape"]), getattr(torch, told["dtype"]))
    if "keys" in told:
        return {key: _of(one, make) for key, one in told["keys"].items()}
    every = [_of(one, make) for one in told["each"]]
    return tuple(every) if told["tuple"] else every
