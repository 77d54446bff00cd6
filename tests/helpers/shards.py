"""Shards that lie as a layout says, put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proctor.oracle.merging.merge import Conflict, Held, Shard, join, where
from proctor.oracle.plans.mesh import Layout, Mesh


def joined(shards: Sequence[Shard], layout: Layout, mesh: Mesh, shape: Sequence[int]) -> tuple[np.ndarray | None, list[Conflict]]:
    """The whole tensor of a shape, `None` where shards do not make it up, and the replicas that differ."""
    layout = layout.on(mesh)
    return join([Held(s, *where(layout, mesh, s.coords, shape), layout) for s in shards], shape)
