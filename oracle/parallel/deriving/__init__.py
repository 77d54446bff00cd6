"""Plans that nobody has to write: read off what a model or a program says of itself, completed and judged by one step on a few threads.

    found = derive(model, batch, "dp=2,tp=2", source="tp_plan")      # or "model", or a function of (model, device_mesh)
    Path("plan.toml").write_text(format_plan(found.plan))

Tensor parallelism comes from the source (`readers`). The rest is found by running: how outputs of rows make those of the batch
(`rows`), which numbers of modules are those of a rank (`sizes`), how random tensors lie (`draws`). At last the plan trains one step on threads,
with dropout, and outputs and gradients are held against one device's; what differs is in `apart`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.deriving.draws import add_draws, folds
from proctor.oracle.parallel.deriving.readers import bare, layers, program, tp_plan
from proctor.oracle.parallel.deriving.rehearsal import Batch, Rehearsal
from proctor.oracle.parallel.deriving.rows import add_rows
from proctor.oracle.parallel.deriving.shorter import shorter
from proctor.oracle.parallel.deriving.sizes import fitted, numbers
from proctor.oracle.parallel.verify import problems, refuse
from proctor.oracle.plans.plan import Plan

SOURCES: Final = ("tp_plan", "model")
_MOST_RANKS: Final = 64


class Derived(NamedTuple):
    """A plan, and what is known of it.

    Args:
        plan: for `parallelize` and the oracle.
        notes: what the source says and the plan does not.
        apart: what differs from one device; nothing for a plan that computes the same.
    """

    plan: Plan
    notes: tuple[str, ...]
    apart: tuple[str, ...]


def derive(
    model: torch.nn.Module,
    batch: object,
    mesh: str,
    *,
    source: str | Callable[[torch.nn.Module, Any], object] = "model",
    data: str = "dp",
    tensor: str = "tp",
) -> Derived:
    """A plan for a model.

    Args:
        model: for one device, with values, on the CPU; a small one of its class does. It stays as it is.
        batch: what it is called with: a tensor, a tuple of arguments, or a mapping of arguments by name.
        mesh: "dp=2,tp=2"; other axes get no rules.
        source: of tensor parallelism: "tp_plan" (the table in the configuration of a model of transformers), "model" (found from a forward), or a
            function of (model, device_mesh) that makes the model parallel by torch's own means.
        data, tensor: names of the axes.

    Raises:
        OracleError: the mesh, the batch or the source cannot be used.
    """
    given, plan = Batch.of(batch), Plan(mesh)
    axes = [axis for axis, size in zip(plan.mesh.axes, plan.mesh.sizes) if size > 1]
    if odd := [axis for axis in axes if axis not in (data, tensor)]:
        raise OracleError(f"the axis {odd[0]!r} is neither that of data ({data}) nor that of tensor parallelism ({tensor})", hint="write mesh dp=2,tp=2, or name the axes")
    if not axes or plan.mesh.world > _MOST_RANKS:
        raise OracleError(f"a mesh of {plan.mesh.world} ranks; a plan is tried on 2 to {_MOST_RANKS} threads", hint="dp=2,tp=2; plan.on(mesh) takes the rules to a larger one")
    if any(tensor.device.type != "cpu" for tensor in model.parameters()):
        raise OracleError("the model is not on the CPU, where the plan is tried", hint="make a small one of its class there")
    rehearsal, notes = Rehearsal(model, given, plan.mesh), []
    if data in axes:
        notes += add_rows(plan, rehearsal.model, given, data)
    if callable(source):
        notes += program.read(plan, rehearsal, source, tensor, data)
    elif source not in SOURCES:
        raise OracleError(f"{source[:60]!r} is no source of a plan", hint=f"there are {', '.join(SOURCES)}, and a function of (model, device_mesh)")
    if tensor in axes:
        if source == "tp_plan":
            notes += tp_plan.read(plan, rehearsal.model, tensor)
        elif source == "model":
            for reader in (layers, bare):
                plan, more = reader.read(plan, rehearsal, tensor)
                notes += more
        layers.tie(plan, rehearsal.model)
        cut = [name.rpartition(".")[0] for name, _ in model.named_parameters() if (layout := plan.param_layout(name)) is not None and layout.cuts]
        plan, _ = fitted(plan, rehearsal, tensor, numbers(rehearsal.model, dict.fromkeys(cut), plan.mesh.size(tensor)))
    plan = shorter(plan, rehearsal.model)
    notes += add_draws(plan, rehearsal, axes)
    if static := problems(plan, rehearsal.model):
        return Derived(plan, tuple(notes), tuple(static))
    apart = rehearsal.cut(plan, axes, train=True).apart
    for other in folds(plan, rehearsal.model, tensor) if apart else ():
        if not (better := rehearsal.cut(other, axes, train=True)).apart:
            plan, apart = other, better.apart
            break
    return Derived(plan, tuple(notes), tuple(apart))


def rehearsed(model: torch.nn.Module, batch: object, plan: Plan) -> tuple[str, ...]:
    """What a plan computes otherwise than one device: one step on threads, in training, without stages and `fully_shard`.

    Args:
        model, batch: as for `derive`.
        plan: with a mesh.

    Returns:
        one line each; nothing where outputs and gradients are those of one device.

    Raises:
        OracleError: the plan cannot work for this model, or has more ranks than are tried.
    """
    if not 1 < plan.mesh.world <= _MOST_RANKS:
        raise OracleError(f"a mesh of {plan.mesh.world} ranks; a plan is tried on 2 to {_MOST_RANKS} threads")
    refuse(problems(plan, model))
    tried = plan.on(plan.mesh)
    tried.pipelines.clear()
    staged = {rule.axis for rule in plan.pipelines}
    axes = [axis for axis, size in zip(plan.mesh.axes, plan.mesh.sizes) if size > 1 and axis not in staged]
    return Rehearsal(model, Batch.of(batch), plan.mesh).cut(tried, axes, train=True).apart


__all__ = ["SOURCES", "Derived", "derive", "rehearsed"]
