"""Where this process stands: rank, world size, and coordinates on named mesh axes.

Read from what the program set up itself: torch.distributed, every DeviceMesh, Megatron's parallel state when it is
imported, and else the process groups that it made: those that tile the world with groups of one size are an axis.
Nothing here issues a collective.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

_MEGATRON = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel", "cp": "context_parallel", "ep": "expert_model_parallel"}


_MAX_TILINGS: Final = 64


def position() -> dict[str, Any]:
    """`{"rank", "world", "coords"}` as known now; rank 0 of 1 outside torch.distributed."""
    dist = sys.modules.get("torch.distributed")
    rank, world = int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    return {"rank": rank, "world": world, "coords": _megatron()}


def restarts() -> int:
    """How often an elastic launcher had started the job again before this process."""
    said = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(said) if said.isdecimal() and len(said) < 7 else 0


def mesh_coords(mesh: Any) -> dict[str, int]:
    """This rank's coordinates on a DeviceMesh with named axes."""
    names = mesh.mesh_dim_names
    where = mesh.get_coordinate()
    return dict(zip(names, (int(c) for c in where))) if names and where else {}


class Axes:
    """Axes behind process groups that were made by hand, such as {0,1} {2,3} and {0,2} {1,3}.

    They have no names, so they are called after how far apart neighbours are: `inner` the axis of the nearest ranks,
    `outer` that of the farthest, `middle` what lies between.
    """

    def __init__(self) -> None:
        self._tilings: list[list[tuple[int, ...]]] = []

    def add(self, ranks: Iterable[int] | None) -> None:
        """Take notice of a group, whether this rank is a member or not."""
        group = tuple(sorted({int(r) for r in ranks})) if ranks is not None else ()
        if len(group) < 2 or len(self._tilings) >= _MAX_TILINGS or any(group in t for t in self._tilings):
            return
        for tiling in self._tilings:
            if _steps(tiling[0]) == _steps(group) and not any(set(group) & set(other) for other in tiling):
                tiling.append(group)
                return
        self._tilings.append([group])

    def coords(self, rank: int, world: int) -> dict[str, int]:
        """This rank's place on each axis that is complete; empty where there are fewer than two axes' worth of ranks."""
        whole = [t for t in self._tilings if sum(map(len, t)) == world and len(t) > 1]
        strided = {stride: t for t in whole if (stride := _stride(t)) > 0}
        out: dict[str, int] = {}
        for stride in sorted(strided):
            name = "inner" if stride == 1 else "outer" if stride == max(strided) else "middle"
            for group in strided[stride]:
                if rank in group and name not in out:
                    out[name] = group.index(rank)
        return out


def _steps(group: tuple[int, ...]) -> list[int]:
    """Distances of neighbours."""
    return [b - a for a, b in itertools.pairwise(group)]


def _stride(tiling: list[tuple[int, ...]]) -> int:
    """Distance of neighbours in all groups; 0 where it is not one number."""
    found = set(_steps(tiling[0]))
    return found.pop() if len(found) == 1 else 0


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
