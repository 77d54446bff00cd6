"""Attention of DTensors on a CPU: of each rank's own rows and heads, which is what torch's kernels of a GPU do.

Torch knows how a GPU's kernels are cut, and has no rule for the CPU's: programs that are written for GPUs would raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_ROWS_AND_HEADS = (0, 1)


def cut_by_heads() -> Callable[[], None]:
    """Put it in the place of `scaled_dot_product_attention`; what is returned takes it off."""
    original = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _cut_alike(query, key, value, attn_mask):
            return original(query, key, value, attn_mask, *args, **kwargs)
        from torch.distributed.tensor import DTensor

        found = original(query.to_local(), key.to_local(), value.to_local(), attn_mask, *args, **kwargs)
        return DTensor.from_local(found, query.device_mesh, query.placements, run_check=False)

    functional.scaled_dot_product_attention = attention

    def undo() -> None:
        functional.scaled_dot_product_attention = original

    return undo


def _cut_alike(query: Any, key: Any, value: Any, mask: Any) -> bool:
    if not hasattr(query, "placements") or not isinstance(query, torch.Tensor) or query.device.type != "cpu" or hasattr(mask, "placements"):
        return False
    placements = [getattr(t, "placements", None) for t in (query, key, value)]
    whole = mask is None or all(n == 1 for n in mask.shape[:-2])
    return placements[0] == placements[1] == placements[2] and whole and all(p.is_replicate() or (p.is_shard() and p.dim in _ROWS_AND_HEADS) for p in query.placements)
