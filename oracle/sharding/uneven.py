"""Contiguous blocks of stated sizes, e.g. query heads 3 + 5, or tables placed by hand.

Without sizes ("uneven:0") they are taken from the shards as recorded: `Layout.resolved`.
"""

from __future__ import annotations

from proctor.oracle.sharding import register


@register("uneven")
def uneven(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The `index`-th block; options: one size per part, in elements or in shares of the extent."""
    if len(options) != parts:
        raise ValueError(f"uneven needs one size per part: {len(options)} sizes for {parts} parts")
    starts = scaled(options, extent)
    return [slice(starts[index], starts[index + 1])]


def scaled(sizes: tuple[int, ...], extent: int) -> list[int]:
    """Where the blocks of relative sizes begin, and the end: (8, 4, 4) of 64 begin at 0, 32, 48; the end is 64."""
    total = sum(sizes)
    if min(sizes, default=0) < 0 or (total == 0 and extent):
        raise ValueError(f"sizes {list(sizes)} must be positive")
    if total and extent % total:
        raise ValueError(f"sizes {list(sizes)} add up to {total}, which does not divide {extent}")
    unit, starts = (extent // total if total else 0), [0]
    for size in sizes:
        starts.append(starts[-1] + size * unit)
    return starts
