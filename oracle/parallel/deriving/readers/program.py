"""A plan read off a program that makes its model parallel: `parallelize_module`, `fully_shard`, `distribute_tensor`, `num_heads //= n`.

The program's own function is called once, on a copy of the model and on torch's fake process group, where nothing is sent. What the styles that it
applies say becomes edges; a parameter that is a DTensor afterwards lies as that says; modules that `fully_shard` took are so in the plan; whole
numbers that are a part of what they were are those of a rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from proctor.errors import OracleError
from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.parallel.deriving.flow import follow
from proctor.oracle.parallel.deriving.patterns import pattern_of
from proctor.oracle.parallel.deriving.readers import layers, torch_styles
from proctor.oracle.parallel.deriving.rehearsal import Rehearsal
from proctor.oracle.plans.mesh import Layout, Mesh
from proctor.oracle.plans.placements import layout_of
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.rules import ParamRule, Rule

Program = Callable[[torch.nn.Module, Any], object]


def read(plan: Plan, rehearsal: Rehearsal, program: Program, tensor: str, data: str) -> list[str]:
    """Rules of what a program does with a model and a device mesh.

    Args:
        plan: gets the rules.
        rehearsal: of the model.
        program: called with the model and a `DeviceMesh` of the plan's axes; works in place or gives the model.
        tensor, data: axes.

    Returns:
        what is not understood, one line each.
    """
    model = copy.deepcopy(rehearsal.model)
    before, names = torch_styles.whole_numbers(model), {id(module): path for path, module in model.named_modules()}
    applied: list[tuple[str, Any]] = []
    with _fake_world(plan.mesh) as devices, _observed(names, applied):
        try:
            made = program(model, devices)
        except Exception as error:  # noqa: BLE001  # the user's own program: whatever it raises is told
            raise OracleError(f"the program that makes the model parallel stopped: {type(error).__name__}: {str(error)[:160]}") from None
        model = made if isinstance(made, torch.nn.Module) else model
        lying, sharded = _lying(model, data), _sharded(model)
    notes = []
    for path, style in applied:
        notes += torch_styles.add_style(plan, rehearsal.model, path, style, tensor)
    _add_layers(plan, rehearsal, {path for path, _ in applied}, lying, tensor)
    for name, layout in lying.items():
        if layout.cuts and plan.param_layout(name) is None:
            plan.add(ParamRule(pattern_of(name, rehearsal.model), Rule(layout.cuts)))
    for pattern, name in torch_styles.counted(model, before, plan.mesh.size(tensor) if tensor in plan.mesh.axes else 1):
        plan.size(pattern, name, axis=tensor)
    for pattern in dict.fromkeys(pattern_of(path, rehearsal.model) for path in sharded if path):
        plan.fully_shard(pattern, axis=data)
    if sharded and not plan.shards:
        plan.fully_shard("", axis=data)
    return list(dict.fromkeys(notes))


@contextlib.contextmanager
def _fake_world(mesh: Mesh) -> Iterator[Any]:
    """A device mesh of the plan's axes, of which this process is the first rank and the others are not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise OracleError("a plan is read off a program where no process group is there yet", hint="do it in a program of one process, before init_process_group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.world)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _observed(names: dict[int, str], applied: list[tuple[str, Any]]) -> Iterator[None]:
    """Note every style of torch that is applied to a module, and do not apply it: its DTensors would be of ranks that are not there."""
    from torch.distributed.tensor.parallel.style import ParallelStyle

    patches = Replaced()
    kinds = [ParallelStyle]
    for kind in kinds:  # grows
        kinds += kind.__subclasses__()

    def note(style: Any, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if id(module) in names:
            applied.append((names[id(module)], style))
        return module

    for kind in kinds:
        if "_apply" in vars(kind):  # the one method of the contract of a style
            patches.replace(kind, "_apply", note)
    try:
        yield
    finally:
        patches.remove()


def _lying(model: torch.nn.Module, data: str) -> dict[str, Layout]:
    """Layouts of parameters that are DTensors, but for the axis along which `fully_shard` cuts them."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            axes = Mesh(tuple(mesh.mesh_dim_names or ()), tuple(mesh.mesh.shape))
            layout = layout_of(axes, [str(placement) for placement in parameter.placements])
            found[name] = Layout(tuple(cut for cut in layout.cuts if cut.axis != data))
    return found


def _sharded(model: torch.nn.Module) -> list[str]:
    """Paths of the modules that `fully_shard` took."""
    from torch.distributed.fsdp import FSDPModule

    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def _add_layers(plan: Plan, rehearsal: Rehearsal, styled: set[str], lying: dict[str, Layout], axis: str) -> None:
    """Edges of layers that are cut and to which no style was applied: by what they feed."""
    cut = {
        name.removesuffix(".weight") for name, layout in lying.items()
        if name.endswith(".weight") and any(one.axis == axis for one in layout.cuts)
    } - styled  # fmt: skip
    if cut:
        flow = follow(rehearsal.model.train(), rehearsal.batch)
        layers.add_layers(plan, flow, [path for path in flow.layers if path in cut], axis, rehearsal.model)
