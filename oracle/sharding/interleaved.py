"""A dimension of several groups, each of which is cut: fused QKV, fused gate and up projections.

"interleaved:0:3": three equal groups. "interleaved:0:[8,4,4]": groups in these proportions (grouped-query attention:
heads of Q, K and V). A rank holds its block of the first group, then of the second, and so on. With equal groups it
is Megatron's `partition_stride` and DTensor's `_StridedShard(dim, split_factor)`.
"""

from __future__ import annotations

import itertools

from proctor.oracle.sharding import register
from proctor.oracle.sharding.chunk import chunk
from proctor.oracle.sharding.uneven import scaled


@register("interleaved")
def interleaved(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The `index`-th block of every group; options: number of groups, or their sizes."""
    if len(options) == 1 and options[0] >= 1:
        groups = [chunk(extent, options[0], g, ())[0] for g in range(options[0])]
    elif len(options) > 1:
        starts = scaled(options, extent)
        groups = [slice(a, b) for a, b in itertools.pairwise(starts)]
    else:
        raise ValueError('interleaved needs a number of groups, "interleaved:0:3", or their sizes, "interleaved:0:[8,4,4]"')
    found = []
    for group in groups:
        block = chunk(group.stop - group.start, parts, index, ())[0]
        found.append(slice(group.start + block.start, group.start + block.stop))
    return found
