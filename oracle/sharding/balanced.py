"""Contiguous blocks that differ by one at most, the longer ones first: `torch.tensor_split`, `numpy.array_split`.

How samplers and hand-written loaders often divide a batch.
"""

from __future__ import annotations

from proctor.oracle.sharding import register


@register("balanced")
def balanced(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The `index`-th block; no options."""
    if options:
        raise ValueError("balanced takes no options")
    size, longer = divmod(extent, parts)
    start = index * size + min(index, longer)
    return [slice(start, start + size + (index < longer))]
