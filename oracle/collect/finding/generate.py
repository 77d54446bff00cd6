"""Parameters that two runs have in common without sharing a file: seeded by canonical name, cut as the plan says.

Each rank makes the logical full tensor from a hash of its name and keeps its shard (TTrace §4.2), so that runs whose
initialisation depends on how they are cut begin alike. Values are never trivial: a bias of zeros or a norm of ones hides
an addition that happens twice, so those get a spread of 0.02 around what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from proctor.errors import MappingError
from proctor.oracle.collect.edges.taps import seed_of
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.plans.mesh import Layout, Mesh
from proctor.oracle.plans.placements import from_dtensor
from proctor.oracle.plans.plan import Plan

SPREAD: Final = 0.02  # around parameters of one value, and of vectors
BLOCK: Final = 16  # values that torch's normal generator draws together on a CPU
GAIN: Final = 0.5  # of 1/√fan_in: activations of a pre-norm layer stay of order one


def generate_parameters(parameters: Iterable[tuple[str, Any]], seed: int, plan_json: str, rank: int, world: int) -> list[str]:
    """Overwrite parameters in place.

    Args:
        parameters: by name, as this rank calls them.
        seed: of the whole set.
        plan_json: a plan, or "".
        rank: this process's.
        world: ranks of the run; a plan of another world (the candidate's, in the reference) does not apply.

    Returns:
        what could not be generated, one sentence each.
    """
    plan = Plan.from_json(plan_json) if plan_json else None
    if plan is not None and plan.mesh.world != world:
        plan = None
    coords = plan.mesh.coords(rank) if plan is not None else {}
    notes: list[str] = []
    with torch.no_grad():
        for name, parameter in parameters:
            if not parameter.is_floating_point():
                continue
            local = local_of(parameter.detach())
            canonical = plan.canonical(name, coords, "param") if plan is not None else name
            shape, index = _place(parameter, local, canonical, plan, coords)
            if index is None:
                notes.append(f"{name}: not generated, its shard {list(local.shape)} does not fit the plan")
                continue
            values = full_tensor(canonical, shape, seed, local)
            local.copy_(values[np.ix_(*index)] if index else values)
    return notes


def full_tensor(name: str, shape: tuple[int, ...], seed: int, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a name, in `like`'s type and on its device.

    A tensor with more of the first dimension begins with the same values.

    Args:
        name: canonical.
        shape: of the whole.
        seed: of the set.
        like: a shard as the program made it; one value throughout is kept as the centre.
    """
    generator = torch.Generator().manual_seed(seed_of("parameter", seed, name))
    count = math.prod(shape)
    # In whole blocks, so that further rows of a padded tensor leave the first ones as they are.
    normal = torch.randn(-(-count // BLOCK) * BLOCK, generator=generator, dtype=torch.float64)[:count].view(shape)
    first = float(like.flatten()[0]) if like.numel() else 0.0
    if like.numel() and bool((like == like.flatten()[0]).all()):
        values = first + SPREAD * normal
    elif len(shape) == 1:
        values = SPREAD * normal
    else:
        values = normal * GAIN / math.sqrt(max(1, math.prod(shape[1:])))
    return values.to(dtype=like.dtype, device=like.device)


def _place(
    parameter: Any, local: torch.Tensor, name: str, plan: Plan | None, coords: dict[str, int]
) -> tuple[tuple[int, ...], list[Any] | None]:
    """The whole shape, and the indices of this rank's part along each dimension; `None` where they do not fit."""
    layout, mesh, shape, where = Layout(), Mesh(), tuple(local.shape), dict(coords)
    if hasattr(parameter, "placements"):
        dmesh = parameter.device_mesh
        names = dmesh.mesh_dim_names or tuple(f"mesh{i}" for i in range(dmesh.ndim))
        mesh, layout, shape = from_dtensor(
            {
                "axes": list(names),
                "sizes": [int(s) for s in dmesh.mesh.shape],
                "placements": [str(p) for p in parameter.placements],
                "shape": [int(s) for s in parameter.shape],
            }
        )
        where = dict(zip(mesh.axes, (int(c) for c in dmesh.get_coordinate() or ()), strict=False))
    elif plan is not None and (found := plan.param_layout(name)) is not None:
        mesh, layout = plan.mesh, found.on(plan.mesh)
        grown = list(shape)
        for dim, cuts in layout.by_dim(len(shape)).items():
            grown[dim] *= math.prod(mesh.size(c.axis) for c in cuts)
        shape = tuple(grown)
    try:
        index = layout.indices(shape, mesh, where)
    except MappingError:
        return shape, None
    return shape, (index if tuple(len(i) for i in index) == tuple(local.shape) else None)
