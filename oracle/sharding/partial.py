"""No cut: every rank holds an addend of the whole tensor (or of its mean, maximum, minimum).

The output of a row-parallel product before its all-reduce; DTensor's `Partial`.
"""

from __future__ import annotations

from proctor.oracle.sharding import register


@register("partial", reduction="sum")
@register("partial-avg", reduction="avg")
@register("partial-max", reduction="max")
@register("partial-min", reduction="min")
def partial(extent: int, parts: int, index: int, options: tuple[int, ...]) -> list[slice]:
    """The whole dimension."""
    if options:
        raise ValueError("partial takes no options")
    return [slice(0, extent)]
