"""Dropout that drops nothing, as long as something is computed in another order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import functional as F


@contextlib.contextmanager
def undropped(module: nn.Module) -> Iterator[None]:
    """Dropout keeps everything: its masks cannot be the same where something is computed in another order."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            changed.append((part, "p", part.p))
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout:
            changed.append((part, "dropout", part.dropout))
            part.dropout = 0.0
    keep, attention = F.dropout, F.scaled_dot_product_attention

    def attended(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    F.dropout = lambda input, p=0.5, training=True, inplace=False: input
    F.scaled_dot_product_attention = attended
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = keep, attention
        for part, name, value in changed:
            setattr(part, name, value)
