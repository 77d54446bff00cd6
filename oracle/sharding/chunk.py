"""Contiguous blocks as `torch.chunk` makes them: of ceil(extent / parts), the last ones shorter or empty.

What DTensor's `Shard`, FSDP2 and Megatron's tensor parallel layers do.
"""

from __future__ import annotations

from proctor.oracle.sharding import register


@register("chunk")
def chunk(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The `index`-th block; no options."""
    if options:
        raise ValueError("chunk takes no options; `uneven` takes sizes, `interleaved` a number of groups")
    size = -(-extent // parts)
    return [slice(min(index * size, extent), min((index + 1) * size, extent))]
