"""After the first backward: gradients of replicated parameters are equal on all ranks that hold them.

A transition that is missing, or a pending gradient that the plan forgot, shows here before the first update. What is compared
are two numbers of each gradient, to 1 %: an addend that nobody reduced is off by as much as the gradient itself, rounding
by 1e-6.
"""

from __future__ import annotations

from typing import Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.parameters import Held
from proctor.oracle.parallel.zero import local

_TOLERANCE: Final = 0.01
_SHOWN: Final = 3


def compare_replicas(model: torch.nn.Module, held: Held, stages: str = "") -> None:
    """Compare; a collective over every axis but that of the stages of a pipeline.

    Raises:
        OracleError: on all ranks, with the parameters and the axis.
    """
    mesh = held.comm.mesh
    for axis in (a for a, size in zip(mesh.axes, mesh.sizes) if size > 1 and a != stages):
        names = [name for name, p in model.named_parameters() if p.requires_grad and axis not in held.axes.get(name, ())]
        if not names:
            continue
        mine = torch.tensor([_marks(model.get_parameter(name).grad) for name in names], dtype=torch.float64)
        parts = torch.stack(held.comm.all_gather(mine, (axis,)))
        apart = (parts - parts[0]).abs().amax((0, 2)) > _TOLERANCE * parts[..., 0].amax(0)
        if bad := [name for name, one in zip(names, apart.tolist()) if one]:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            norms = ", ".join(f"{n:.3g}" for n in parts[:, names.index(bad[0]), 0].tolist())
            raise OracleError(
                f"gradients of {', '.join(bad[:_SHOWN])}{more} differ between the ranks along {axis} (norms {norms})",
                hint=f'an addend that nobody reduces: [[pending]] axes = ["{axis}"], or grad_from = {{ {axis} = "partial" }} at an edge behind',
            )


def _marks(gradient: torch.Tensor | None) -> tuple[float, float]:
    if gradient is None or not gradient.numel():
        return 0.0, 0.0
    flat = local(gradient.detach()).reshape(-1).double()
    signs = torch.arange(flat.numel(), dtype=torch.float64).mul_(0.7).sin_()
    return float(flat.norm()), float(flat @ signs)
