"""`parallelize`: a model that was written for one device, run by a plan.

    model = GPT(config)                                  # unchanged; or deferred(GPT, config)
    proctor.parallelize(model, "plan.toml")              # under torchrun, in `threads.run`, or alone
    optimizer = torch.optim.AdamW(model.parameters())    # as before, and so is the loop

Parameters become this rank's parts, in place. Between the transitions of the plan everything runs on plain tensors: no
DTensor, no dispatch. Random numbers of the forward are those of one device. Gradients that the plan calls pending are
reduced when a backward ends. The state dict is that of the unsharded model. Before anything is changed the plan is held
against the model (`verify`). Source: veScale §4, §6.2 (static eager), §6.3.
Parameters may be on a GPU (move them before, or by `model.to` after); that has not run, for want of one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel import intercept, verify, zero
from proctor.oracle.parallel.buckets import Buckets, Pending
from proctor.oracle.parallel.comm import Comm, comm_of
from proctor.oracle.parallel.crossing.edges import After, Crossing, Edge, Lookup, changed
from proctor.oracle.parallel.factories import Factories
from proctor.oracle.parallel.parameters import Held, compare_replicas
from proctor.oracle.parallel.placing import Placing
from proctor.oracle.parallel.staged.pipeline import Stages
from proctor.oracle.parallel.streams import Stream, stream
from proctor.oracle.parallel.threads import Thread
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import plan_of


def parallelize(
    model: torch.nn.Module, plan: Plan | str | Path, *, rng: str = "keyed", seed: int | None = None, check: bool = True
) -> torch.nn.Module:
    """Cut a model as a plan says, and install what makes it train in parallel.

    Args:
        model: for one device. Every rank has made it with the same values, or it comes from `deferred`, and each rank
            makes its parts of those values here.
        plan: with a mesh of as many ranks as the job has; an object or a file.
        rng: "keyed" (order-free, O(local)) or "stock" (what plain torch draws on one CPU; continues the process's default
            generator).
        seed: of the keyed stream, and of the stock stream on thread ranks; without it torch's initial seed.
        check: compare neighbouring edges in the first forward, and gradients of replicas after the first backward.

    Returns:
        the same model.

    Raises:
        OracleError: the plan cannot work for this model, with what is wrong in one line; nothing has been changed then.
    """
    found = plan_of(plan)
    if found is None or not found.mesh.axes:
        raise OracleError("the plan has no mesh", hint='Plan("dp=2,tp=2"), or [mesh] with axes and sizes')
    if hasattr(model, "_proctor_parallel"):
        raise OracleError(f"{type(model).__name__} runs by a plan already")
    comm = comm_of(found.mesh)
    verify.refuse(verify.problems(found, model))
    if rng == "stock" and found.draws and any(found.mesh.size(rule.axis) > 1 for rule in found.pipelines):
        raise OracleError("the stock stream needs all draws in the order of one device, and a stage makes its own only", hint='give rng="keyed"')
    Parallel(model, found, comm, _stream(rng, seed, comm), check)
    return model


def _stream(kind: str, seed: int | None, comm: Comm) -> Stream:
    if seed is None:
        seed = torch.initial_seed()
    seed &= (1 << 63) - 1
    # Threads share torch's default generator, so each rank gets one of its own.
    own = torch.Generator().manual_seed(seed) if isinstance(comm, Thread) else torch.default_generator
    return stream(kind, seed, own)


class Parallel:
    """A model that runs by a plan; kept on the model as `_proctor_parallel`.

    Args:
        model: is changed in place.
        plan: has been held against the model.
        comm: where this rank is.
        stream: of random numbers.
        check: see `parallelize`.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan, comm: Comm, stream: Stream, check: bool) -> None:
        from proctor.oracle.parallel.deferred import tape_of

        intercept.install()
        self.model, self.plan, self.comm, self.stream = model, plan, comm, stream
        self.checking = check and comm.mesh.world > 1
        self.held = Held(plan, comm)
        self.placing = Placing(plan, comm, stream)
        object.__setattr__(model, "_proctor_parallel", self)
        tape = tape_of(model)
        if tape is None:
            self.held.cut(model)
        else:
            tape.materialise(model, self.held, stream)
        if self.held.between:
            zero.shard(model, plan, self.held, tape is not None)
        self.stages = self._staged() if plan.pipelines else None
        axis = self.stages.axis if self.stages is not None and not self.stages.alone else ""
        tied = self.stages.tied if self.stages is not None and axis else []
        others = {id(one.parameter) for one in tied if self.stages is not None and one.ranks[0] != self.stages.at}
        self.held.mark(model, axis, others)
        self._divide()
        self.buckets: Buckets | None = None
        if self.held.between:
            zero.reduce_where_they_arrive(model, self._pending(), comm)
        else:
            self.buckets = Buckets([*self._pending(), *(one.pending(self.stages.at, axis) for one in tied if self.stages is not None)], comm)
        self._hook()

    def _staged(self) -> Stages:
        stages = Stages(self.model, self.plan.pipelines[0], self.comm)
        # Stages have other transitions and gradients than each other, and all ranks must make all groups alike.
        spoken = {(axis,) for axis in self.comm.mesh.axes} | {one.axes for one in self._pending()} | set(self.held.axes.values())
        spoken |= {(cut.axis,) for edge in self.plan.edges for rule in edge.rules.values() for cut in rule.cuts if _on(cut.axis, self.plan)}
        for axes in sorted(spoken - {()}):
            self.comm.prepare(axes)
        stages.drop(self.model)
        return stages

    def _divide(self) -> None:
        for path, module in self.model.named_modules():
            for rule in self.plan.sizes:
                if compiled(rule.module).fullmatch(path):
                    size = self.comm.mesh.size(rule.axis) if _on(rule.axis, self.plan) else 1
                    for name in rule.names:
                        setattr(module, name, getattr(module, name) // size)

    def _pending(self) -> list[Pending]:
        found = []
        mesh = self.plan.mesh
        for name, parameter in self.model.named_parameters():
            ways = {
                axis: rule.reduce
                for rule in reversed(self.plan.pendings)
                if compiled(rule.path).fullmatch(name)
                for joint in rule.axes
                for axis in joint.split("+")
                if axis in mesh.axes and mesh.size(axis) > 1 and axis != self.held.between
            }
            for reduce in sorted(set(ways.values())):
                axes = tuple(axis for axis in mesh.axes if ways.get(axis) == reduce)
                if parameter.requires_grad and axes:
                    found.append(Pending(name, parameter, axes, reduce))
        return found

    def _hook(self) -> None:
        model = self.model
        factories = Factories(self.plan, self.comm)
        for path, module in model.named_modules():
            if factories.concerns(path):
                module.forward = factories.inside(path, module.forward)
            self._hook_edges(path, module)
            if any(compiled(rule.module).fullmatch(path) for rule in self.plan.draws):
                module.register_forward_pre_hook(lambda m, a, p=path: self.placing.enter(p))
                module.register_forward_hook(lambda m, a, o: self.placing.leave(), always_call=True)
        if self.stages is not None:
            self.stages.stand(model, self.buckets.quiet if self.buckets is not None else contextlib.nullcontext)
        self._forward, model.forward = model.forward, self._run
        model.register_state_dict_post_hook(lambda *args: self.held.gather(*args))  # torch marks the hook: no method
        model.register_load_state_dict_pre_hook(lambda *args: self.held.scatter(*args))

    def _hook_edges(self, path: str, module: torch.nn.Module) -> None:
        rules = [rule for rule in self.plan.edges if compiled(rule.module).fullmatch(path)]
        lookup = None
        for rule in rules:
            if rule.lookup and _on(rule.lookup, self.plan) and self.plan.mesh.size(rule.lookup) > 1:
                rows = self.held.running[f"{path}.weight" if path else "weight"].indices[0]
                lookup = Lookup(int(rows[0]), len(rows))
                lookup.keep_padding(module)
        edges = {at: [Edge(rule, path, self.comm) for rule in rules if rule.at == at and rule.rules] for at in ("input", "output")}
        afters = [After(rule.after, module) for rule in rules if rule.after and module._parameters.get(rule.after) is not None]
        crossing = Crossing(module.forward, self, edges["input"], edges["output"], lookup, afters)
        if crossing.needed:
            module.forward = crossing.short()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's `forward`: its draws are placed. No hooks, as for `Crossing`."""
        self.placing.enter_model()
        try:
            output = self._forward(*args, **kwargs) if self.stages is None else self.stages.run(self._forward, args, kwargs)
            if self.checking or self.plan.draws or (self.stages is not None and self.stages.tied):
                self._listen(output)
        finally:
            self.placing.leave_model()
        return output

    def _listen(self, output: Any) -> None:
        """Hear of the backward of what the model gives."""
        forward = self.placing.forward

        def look(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(lambda gradient: self._backward(forward))
            return tensor

        changed(output, look)

    def _backward(self, forward: int) -> None:
        self.placing.backward_of(forward)
        if self.buckets is not None and self.stages is not None and self.stages.tied:
            self.buckets.begin()  # also where this rank holds none of them
        if self.checking:
            self.checking = False
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)

    def _compare(self) -> None:
        # Queued before the buckets' own callback, which reduces; so look once those are done.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: compare_replicas(self.model, self.held, self.stages.axis if self.stages is not None else ""))


def _on(axis: str, plan: Plan) -> bool:
    return all(name in plan.mesh.axes for name in axis.split("+"))
