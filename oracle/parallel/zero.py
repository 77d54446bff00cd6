"""Parameters that lie cut along an axis between their uses (ZeRO-3), carried out by torch's own `fully_shard`.

A plan's `fully_shard` rules say which modules are gathered at once. What a rank holds between uses is its part by the plan's
other axes, cut once more along dimension 0; while a module computes its parameters are plain tensors, as without. Gradients
over the axis are reduced by torch; those over other axes where a gradient arrives, one by one, since torch takes them away
before a backward ends. Only among processes: torch's groups know no threads. Source: veScale §4, phases INIT and RUN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.comm import Comm, Processes
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan import Plan

if TYPE_CHECKING:
    from proctor.oracle.parallel.buckets import Pending
    from proctor.oracle.parallel.parameters import Held

_HOOKED: Final = "_proctor_pending"  # on a gathered parameter, which torch keeps from step to step


def axis_of(plan: Plan, comm: Comm) -> str:
    """The axis along which parameters lie cut between their uses; "" where nothing is to do.

    Raises:
        OracleError: ranks are threads.
    """
    axis = plan.shards[0].axis if plan.shards else ""
    if not axis or axis not in plan.mesh.axes or plan.mesh.size(axis) == 1:
        return ""
    if not isinstance(comm, Processes):
        raise OracleError("fully_shard needs processes of torch.distributed", hint="start the program under torchrun")
    return axis


def shard(model: torch.nn.Module, plan: Plan, held: Held, deferred: bool) -> None:
    """Hand the parameters of a model over to `fully_shard`.

    Args:
        model: its parameters are this rank's parts by the other axes; of a deferred model those between uses already.
        plan: with `fully_shard` rules of one axis.
        held: says where the parts lie.
        deferred: see `model`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor, Shard

    axis, mesh = held.between, plan.mesh
    along = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)[axis]

    def distributed(name: str, local: torch.Tensor) -> torch.Tensor:
        like = torch.empty(held.running[name].local, device="meta")
        made: torch.Tensor = DTensor.from_local(local, along, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())
        return made

    held.distributed = distributed
    values = _taken_out(model, held) if deferred else {}
    for path, module in reversed(list(model.named_modules())):
        if not path or any(compiled(rule.module).fullmatch(path) for rule in plan.shards):
            fully_shard(module, mesh=along)
    ways = {rule.reduce for rule in plan.pendings if axis in rule.axes}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # what gloo has
            module.set_gradient_divide_factor(float(mesh.size(axis)) if ways == {"avg"} else 1.0)
    if deferred:
        made = {id(value): torch.nn.Parameter(distributed(name, value.data), value.requires_grad) for name, value in values.items()}
        model.load_state_dict({name: made[id(value)] for name, value in values.items()}, strict=False, assign=True)


def _taken_out(model: torch.nn.Module, held: Held) -> dict[str, torch.nn.Parameter]:
    """The parameters by all their names; empty ones of the shape in which modules compute stand in their places."""
    values = dict(model.named_parameters(remove_duplicate=False))
    empty = {
        id(value): torch.nn.Parameter(torch.empty(held.running[name].local, dtype=value.dtype, device="meta"), value.requires_grad)
        for name, value in values.items()
    }
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = empty[id(value)]
    return values


def reduce_where_they_arrive(model: torch.nn.Module, pending: Iterable[Pending], comm: Comm) -> None:
    """Reduce gradients over other axes before torch takes them: a hook on the gathered parameter, found in the first forward."""
    for one in pending:
        path, _, leaf = one.name.rpartition(".")
        model.get_submodule(path).register_forward_pre_hook(_hook(leaf, one, comm))


def _hook(leaf: str, one: Pending, comm: Comm) -> Any:
    def before(module: torch.nn.Module, args: Any) -> None:
        gathered = module._parameters[leaf]
        if gathered is not None and gathered.requires_grad and one.axes not in (done := getattr(gathered, _HOOKED, ())):
            gathered.register_hook(lambda gradient: comm.all_reduce(gradient.clone(), one.axes, one.reduce))
            setattr(gathered, _HOOKED, (*done, one.axes))

    return before


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or gradient; the tensor itself where torch has not distributed it."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
