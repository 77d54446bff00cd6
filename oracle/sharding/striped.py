"""A sequence dealt out so that causal attention costs every rank the same: context parallelism.

"striped:1": zigzag, the sequence in 2·parts blocks, rank i holds blocks i and 2·parts−1−i (Megatron, torch's
`context_parallel` with load balancing). "striped:1:1": element by element, rank i holds i, i+parts, …; "striped:1:64"
likewise with blocks of 64 (striped attention).
"""

from __future__ import annotations

from proctor.oracle.sharding import register
from proctor.oracle.sharding.chunk import chunk


@register("striped")
def striped(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The stripes of one rank; options: none for zigzag, or the length of a stripe."""
    if not options:
        return [chunk(extent, 2 * parts, block, ())[0] for block in (index, 2 * parts - 1 - index)]
    if len(options) > 1 or options[0] < 1:
        raise ValueError('striped takes the length of a stripe, "striped:1:64", or nothing (zigzag)')
    width = options[0]
    if width == 1:
        return [slice(index, extent, parts)]
    return [slice(at, min(at + width, extent)) for at in range(index * width, extent, parts * width)]
