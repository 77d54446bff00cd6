"""What the tensors that cross an edge of a module are called: `""` for a lone positional one, else their path."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def named(values: Any, side: str) -> dict[str, torch.Tensor]:
    """The tensors that cross an edge, by slot.

    Args:
        values: `(args, kwargs)` of a module, or what it returned.
        side: `input` or `output`.
    """
    leaves = pytree.tree_leaves(values)
    return {s: x for s, x in zip(slots_of(values, leaves, side), leaves, strict=True) if isinstance(x, torch.Tensor)}


def slots_of(values: Any, leaves: list[Any], side: str) -> list[str]:
    """The slot of each leaf of such values."""
    paths = _paths(values)
    if side == "output":
        return [_tidy(p) for p in paths]
    tidy = []
    for path in paths:  # values is (args, kwargs)
        rest = path[3:] if path.startswith(("[0]", "[1]")) else path
        tidy.append(_tidy(rest))
    lone = sum(isinstance(x, torch.Tensor) for x in leaves) == 1
    return ["" if lone and t == "0" else t for t in tidy]


def _paths(values: Any) -> list[str]:
    """The path of each leaf; parts of a class that a library has registered without names for them (TorchRec's `KeyedTensor`) are numbered."""
    try:
        return [pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(values)[0]]
    except ValueError:
        parts = [(pytree.keystr(p), x) for p, x in pytree.tree_flatten_with_path(values, is_leaf=_nameless)[0]]
    return [f"{path}{more}" for path, x in parts for more in ([f"[{i}]" for i in range(len(pytree.tree_leaves(x)))] if _nameless(x) else [""])]


def _nameless(value: Any) -> bool:
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def _tidy(path: str) -> str:
    text = path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return text.strip(".")
