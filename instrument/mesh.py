"""Where this process stands: rank, world size, and coordinates on named mesh axes.

Read from what the program set up itself: torch.distributed, every DeviceMesh, and Megatron's parallel state when it is
imported. Nothing here issues a collective.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_MEGATRON = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel", "cp": "context_parallel", "ep": "expert_model_parallel"}


def position() -> dict[str, Any]:
    """`{"rank", "world", "coords"}` as known now; rank 0 of 1 outside torch.distributed."""
    dist = sys.modules.get("torch.distributed")
    rank, world = int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    return {"rank": rank, "world": world, "coords": _megatron()}


def mesh_coords(mesh: Any) -> dict[str, int]:
    """This rank's coordinates on a DeviceMesh with named axes."""
    names = mesh.mesh_dim_names
    where = mesh.get_coordinate()
    return dict(zip(names, (int(c) for c in where))) if names and where else {}


def group_label(group: Any) -> str:
    """How a process group is called in signatures: its ranks when few, its size otherwise."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return f"world of {len(ranks)}"
    return f"group of {len(ranks)}"


def _megatron() -> dict[str, int]:
    state = sys.modules.get("megatron.core.parallel_state")
    coords: dict[str, int] = {}
    if state is None or not state.model_parallel_is_initialized():
        return coords
    for axis, name in _MEGATRON.items():
        get = getattr(state, f"get_{name}_rank", None)
        if get is not None:
            try:
                coords[axis] = int(get())
            except (AssertionError, RuntimeError):
                continue
    return coords
