"""An operation of a tape by torch's own kernel, on numbers: what integers and truth values it gives of true floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from proctor.oracle.prove.tape import Array, Node


def tensor_of(a: Array, kind: str) -> torch.Tensor:
    """An array as torch has it; `kind` is a window's."""
    return torch.from_numpy(np.array(a)).bool() if kind == "b" else torch.from_numpy(np.array(a))


def called(node: Node, tensors: list[torch.Tensor]) -> list[Array | None]:
    """An operation by torch itself."""
    space, name, overload = node.op.split(".")
    op = getattr(getattr(getattr(torch.ops, space), name), overload)
    plain = {k: v for k, v in ((k, _plain(v, tensors)) for k, v in node.kwargs.items()) if v is not None}
    found = op(*(_plain(v, tensors) for v in node.args), **plain)
    return [np.asarray(t.numpy(), np.float64 if t.is_floating_point() else np.int64) if isinstance(t, torch.Tensor) else None for t in (found if isinstance(found, list | tuple) else [found])]


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if "t" in value:
            return tensors[value["t"]]
        if "d" in value:
            return getattr(torch, value["d"].removeprefix("torch."))
        return value["v"] if "r" in value else float(value["x"])
    return [_plain(v, tensors) for v in value] if isinstance(value, list) else value
