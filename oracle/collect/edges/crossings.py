"""What crosses the edges of modules: values and their gradients are recorded there, and may be replaced or get noise.

A module is seen by hooks, or around its call where it is compiled (`regions.py`); a tensor by a tap (`taps.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.collect.edges.forced import Supplied
from proctor.oracle.collect.edges.ops import OpRecorder
from proctor.oracle.collect.edges.own_noise import OwnOperations
from proctor.oracle.collect.edges.regions import Edge, Regions, unseen
from proctor.oracle.collect.edges.running import Place, Running
from proctor.oracle.collect.edges.scored import Scored
from proctor.oracle.collect.edges.slots import named, slots_of
from proctor.oracle.collect.edges.taps import FP8_SIGMA, UNIT_ROUNDOFF, noisy, tap, watched
from proctor.oracle.collect.finding.roots import Meta, meta_of, unwrapped
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.tape import Tape
from proctor.oracle.tensors import EVALUATION, LATER, SHARED


class Crossings:
    """The edges of the modules of a process.

    Args:
        config: tells about noise.
        progress: where the run is.
        tape: records.
        supplied: has values that take the place of the program's.
        regions: that are compiled.
        guard: takes our errors.
        next_step: is called when the forward begins that is the first of another step.

    Attributes:
        running: the modules that run now.
        ops: records operations inside one module; `None` where that is not asked for.
    """

    def __init__(
        self,
        config: CollectConfig,
        *,
        progress: Progress,
        tape: Tape,
        supplied: Supplied,
        regions: Regions,
        guard: RecordingGuard,
        next_step: Callable[[], None],
    ) -> None:
        self.running = Running(training=not config.forward)
        self.ops: OpRecorder | None = None
        self._progress, self._tape, self._supplied, self._regions = progress, tape, supplied, regions
        self._guard, self._next_step = guard, next_step
        self._noise, self._evaluations = config.noise, config.evaluations
        self._metas: dict[str, Meta] = {}  # of modules with hooks, by name
        self._own: OwnOperations | None = None
        self._scored = Scored(tape) if config.forward and config.statistics else None
        if config.watch_busy or config.busy:
            self._own = OwnOperations(config.noise, config.busy, self.running.stack)
        if regions.on:
            self._enter, self._leave = unseen(self._enter), unseen(self._leave)  # type: ignore[method-assign]

    # -- modules --------------------------------------------------------------------------------------------

    def hook(self, name: str, module: nn.Module, left_out: frozenset[str]) -> list[Callable[[], None]]:
        """Tap a module's input and output, but for sides that the model as a whole does not have there.

        Returns:
            what takes the hooks off.
        """
        if isinstance(module, torch.jit.ScriptModule):
            self._tape.info.notes.append(f"{name}: a TorchScript module is not looked into")
            return []
        meta = self._metas[name] = meta_of(name, module)
        key = _key(name, module)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if self._regions.running else self._enter(meta, args, kwargs, key, "input" not in left_out)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return None if self._regions.running else self._leave(meta, output, "output" not in left_out)

        try:
            handles = [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=False),
            ]
        except Exception as e:  # noqa: BLE001 - a module with rules of its own
            self._tape.info.notes.append(f"{name}: cannot be hooked: {type(e).__name__}")
            return []
        return [h.remove for h in handles]

    def edge(self, name: str, module: nn.Module, left_out: frozenset[str], *, compiled: bool) -> None:
        """Look at a module where it is called; as of `Edge`."""
        inner = unwrapped(module)
        self._regions.edges[id(module)] = Edge(meta_of(name, inner), _key(name, inner), left_out, compiled)
        if compiled:
            self._regions.names.add(name)

    def call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module; of one without hooks what crosses its edges is seen here.

        Args:
            original: calls a module.
            module: that one.
        """
        if self._own is not None and not self._own.watching and self._progress.recording():
            with self._own:
                return original(module, *args, **kwargs)
        edge = self._regions.edges.get(id(module))
        if edge is None or self._regions.running or self._progress.over:
            return original(module, *args, **kwargs)
        return self._call_at(edge, original, module, args, kwargs)

    def _call_at(self, edge: Edge, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        changed = self._enter(edge.meta, args, kwargs, edge.key, "input" not in edge.left_out)
        if changed is not None:
            args, kwargs = changed
        self._regions.running = edge.compiled
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._regions.running = False
        other = self._leave(edge.meta, output, "output" not in edge.left_out)
        return output if other is None else other

    def next_step(self) -> None:
        """Calls are counted by step."""
        self.running.next_step()

    def evaluated(self) -> dict[str, int]:
        """How often each module was called without gradients in this step."""
        out: dict[str, int] = {}
        for key, count in self.running.evaluated.items():
            name = key.partition("\0")[0]
            out[name] = max(out.get(name, 0), count)
        return out

    def busy(self) -> list[str]:
        """Modules that were found to have many operations of their own."""
        return sorted(self._own.busy) if self._own is not None else []

    def close(self) -> None:
        """Take off what is not a module's hook."""
        if self._own is not None:
            self._own.close()

    # -- what the module that runs does ---------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, kind: str, place: Place, slot: str) -> None:
        """Record a tensor from within a module."""
        if not place.evaluation or self._kept(self.running.depth):
            self._tape.record(tensor, call=place.call, kind=kind, meta=self._metas[place.name], slot=slot, phase=_phase(place))

    def casts_to_fp8(self) -> None:
        """An 8-bit float is made in the innermost module that runs, and so in its parent."""
        self._tape.fp8.update(place.name for place in self.running.stack[-2:])

    def record_operations(self, name: str, step: int) -> None:
        """Record what happens inside a module, and nothing else."""
        self.ops = OpRecorder(name, step, self._keep_operation)
        self._tape.only = "op"

    def _keep_operation(self, tensor: torch.Tensor, number: int, place: int, call: int) -> None:
        self._tape.record(tensor, call=call, kind="op", meta=(str(number), "", ""), slot=str(place))

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no operation of the program."""
        return self.ops.paused() if self.ops is not None else contextlib.nullcontext()

    # -- edges ----------------------------------------------------------------------------------------------

    def _enter(self, meta: Meta, args: Any, kwargs: Any, key: str, wanted: bool) -> Any:
        progress = self._progress
        if progress.over or progress.trial or not self._tape.running():
            return None
        if progress.boundary:  # behind the program's own hooks, which may gather parameters that late
            self._guard.hook(self._next_step)()
            if progress.over:
                return None
        place = self.running.enter(meta[0], key)
        self._tape.at(meta[0])
        if self._own is not None:
            self._own.entered(place)
        try:
            if place.evaluation and not self._kept(self.running.depth):
                return None
            if self.ops is not None and not place.again:
                return self._enter_recorded(self.ops, meta, place, (args, kwargs), wanted)
            if self._scored is not None and self.running.depth == 1:
                self._scored.reads((args, kwargs))
            return self._cross(meta, place, "input", (args, kwargs)) if wanted else None
        except Exception as e:  # noqa: BLE001 - the user's forward goes on
            self._guard.fail(e)
            return None

    def _leave(self, meta: Meta, output: Any, wanted: bool) -> Any:
        if self._progress.over or not self._tape.running():
            return None
        place = self.running.leave(meta[0])
        if place is None:
            return None
        try:
            if place.evaluation and not self._kept(self.running.depth + 1):
                return None
            if self.ops is not None and not place.again:
                return self._leave_recorded(self.ops, meta, place, output, wanted)
            changed = self._cross(meta, place, "output", output) if wanted else None
            if self._scored is not None and self.running.depth == 0:
                self._scored.gives(meta, place, output if changed is None else changed)
            return changed
        except Exception as e:  # noqa: BLE001 - the user's forward goes on
            self._guard.fail(e)
            return None

    def _kept(self, depth: int) -> bool:
        """Whether an evaluation is looked at: the first few of a step; of a step that is not recorded in full, the model's own edges.

        Args:
            depth: of the module that runs, 1 for the outermost.
        """
        if self.ops is not None or self.running.forwards > self._evaluations:
            return False
        return self._noise is not None or self._tape.whole() or depth <= 1

    def _enter_recorded(self, ops: OpRecorder, meta: Meta, place: Place, values: Any, wanted: bool) -> Any:
        """As without `ops`, telling what the caller gives and what the module gets."""
        ops.entering(meta[0], place.call, named(values, "input"))
        changed = self._cross(meta, place, "input", values) if wanted else None
        ops.entered(meta[0], place.call, self._progress.step, named(values if changed is None else changed, "input"))
        return changed

    def _leave_recorded(self, ops: OpRecorder, meta: Meta, place: Place, output: Any, wanted: bool) -> Any:
        ops.leaving(meta[0], place.call, named(output, "output"))
        changed = self._cross(meta, place, "output", output) if wanted else None
        ops.left(meta[0], place.call, named(output if changed is None else changed, "output"))
        return changed

    def _cross(self, meta: Meta, place: Place, side: str, values: Any) -> Any:
        """Look at the tensors that cross an edge; returns what is to cross instead, or `None`."""
        leaves, spec = pytree.tree_flatten(values)
        if not any(isinstance(x, torch.Tensor) for x in leaves):
            return None
        slots = slots_of(values, leaves, side)
        out = list(leaves)
        for where in self._shared(leaves, slots, meta, place, side):
            goes = self._crossed(leaves[where[0]], meta, place, side, [slots[i] for i in where])
            for i in where:
                out[i] = goes
        return pytree.tree_unflatten(out, spec) if any(a is not b for a, b in zip(out, leaves, strict=True)) else None

    def _shared(self, leaves: list[Any], slots: list[str], meta: Meta, place: Place, side: str) -> list[list[int]]:
        """Where each tensor is: one that is in several places stays one, as modules may ask (attention: `query is key`)."""
        found: dict[int, list[int]] = {}
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                found.setdefault(id(x), []).append(i)
        out = []
        for where in found.values():
            x, theirs = leaves[where[0]], [slots[i] for i in where]
            sources = [s for s in (self._supplied.given, self._supplied.force) if s is not None and side == "input" and len(where) > 1 and not place.evaluation]
            together = all(s.alike(self._progress.step, side, meta[0], theirs, place.call, x) for s in sources)
            out += [where] if together else [[i] for i in where]
        return out

    def _crossed(self, x: torch.Tensor, meta: Meta, place: Place, side: str, slots: Sequence[str]) -> torch.Tensor:
        given = self._supplied.given
        if given is not None and side == "input" and not place.evaluation:
            other = given(self._progress.step, side, meta[0], slots[0], place.call, x)
            x = x if other is None else other
        if x.is_floating_point():
            return self._tapped(x, meta, place, side, slots)
        for slot in slots:
            self._tape.record(x, call=place.call, kind=side, meta=meta, slot=slot, recompute=place.again, phase=_phase(place))
        return x

    def _tapped(self, x: torch.Tensor, meta: Meta, place: Place, side: str, slots: Sequence[str]) -> torch.Tensor:
        name, call, again = meta[0], place.call, place.again
        first, slot = slots[0], SHARED.join(slots)  # of its value, and of its gradient
        progress, tape, force, seed = self._progress, self._tape, self._supplied.force, self._noise
        sigma = UNIT_ROUNDOFF.get(x.dtype, 0.0) if side == "output" else FP8_SIGMA if name in tape.fp8 else 0.0
        grad_sigma = UNIT_ROUNDOFF.get(x.dtype, 0.0) if side == "output" else 0.0
        given = self._supplied.given
        if given is not None and not given.holds(progress.step, f"grad_{side}", name, slot, call):
            given = None
        if place.evaluation:
            force = given = None

        def on_value(value: torch.Tensor) -> torch.Tensor | None:
            other = None
            if seed is not None and sigma:
                other = noisy(value.detach(), sigma, seed, side, name, first, call)
            for one in slots:
                tape.record(value if other is None else other, call=call, kind=side, meta=meta, slot=one, recompute=again, phase=_phase(place))
            if force is not None and side == "input":
                other = force(progress.step, "input", name, first, call, value.detach())
            return other

        times = itertools.count()  # a gradient of a gradient, or a graph that is kept, comes back past this edge again

        def on_grad(grad: torch.Tensor) -> torch.Tensor | None:
            number = next(times)
            own = f"{slot}{LATER}{number}" if number else slot
            other = given(progress.step, f"grad_{side}", name, own, call, grad.detach()) if given is not None else None
            if seed is not None and grad_sigma:
                other = noisy(grad.detach() if other is None else other, grad_sigma, seed, f"grad_{side}", name, own, call)
            if not progress.over:
                tape.record(grad if other is None else other, call=call, kind=f"grad_{side}", meta=meta, slot=own)
            if force is not None and side == "output":
                other = force(progress.step, "grad_output", name, own, call, grad.detach())
            if self.ops is not None:
                self.ops.crossed(side, name, own, call, grad, grad if other is None else other)
            return other

        def safely(function: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def run(value: torch.Tensor) -> torch.Tensor | None:
                try:
                    with torch.no_grad(), self.paused():
                        return function(value)
                except Exception as e:  # noqa: BLE001 - the user's pass goes on
                    self._guard.fail(e)
                    return None

            return run

        if place.evaluation:
            other = safely(on_value)(x)
            return x if other is None else other
        if seed is None and force is None and given is None and not (x.requires_grad and x.is_leaf):
            safely(on_value)(x)
            return watched(x, safely(on_grad), own_edge=side == "input")
        return tap(x, safely(on_value), safely(on_grad))


def _phase(place: Place) -> str:
    return EVALUATION if place.evaluation else ""


def _key(name: str, module: nn.Module) -> str:
    """Under which calls of a module are counted: chunks of one model apart."""
    return f"{name}\0{id(module)}"
