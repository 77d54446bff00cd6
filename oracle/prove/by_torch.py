"""An operation of a tape by torch's own kernel, on numbers: what integers and truth values it gives of true floats."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from proctor.oracle.prove.tape import Array, Node


def tensor_of(a: Array, kind: str) -> torch.Tensor:
    """An array as torch has it; `kind` is a window's."""
    return torch.from_numpy(np.array(a)).bool() if kind == "b" else torch.from_numpy(np.array(a))


def called(node: Node, tensors: list[torch.Tensor]) -> list[Array | None]:
    """An operation by torch itself."""
    return [_array(t) if isinstance(t, torch.Tensor) else None for t in _called(node, tensors)]


def called_many(node: Node, tensors: list[torch.Tensor], wide: Sequence[bool]) -> list[Array | None] | None:
    """The same for many cases at once, which are the first dimension of the tensors that are `wide`, and of what is found; None where torch cannot."""
    numbers: list[int] = []
    count = 0

    def once(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal count
        found = _called(node, list(given))
        count, numbers[:] = len(found), [k for k, t in enumerate(found) if isinstance(t, torch.Tensor)]
        return tuple(found[k] for k in numbers)

    with warnings.catch_warnings(), _without_loops():
        warnings.simplefilter("ignore")
        try:
            found = torch.vmap(once, in_dims=tuple(0 if w else None for w in wide))(*tensors)
        except Exception:  # noqa: BLE001 - an operator that takes no such tensors; the cases are done one by one
            return None
    results: list[Array | None] = [None] * count
    for k, t in zip(numbers, found):
        results[k] = _array(t)
    return results


@contextlib.contextmanager
def _without_loops() -> Iterator[None]:
    """Torch has a loop of its own for operators that it has no batched form of, and warns of it past Python: it is to refuse these."""
    functorch = torch._C._functorch
    allow = getattr(functorch, "_set_vmap_fallback_enabled", lambda _: None)
    allow(False)
    try:
        yield
    finally:
        allow(True)


def _called(node: Node, tensors: list[torch.Tensor]) -> Sequence[Any]:
    space, name, overload = node.op.split(".")
    op = getattr(getattr(getattr(torch.ops, space), name), overload)
    plain = {k: v for k, v in ((k, _plain(v, tensors)) for k, v in node.kwargs.items()) if v is not None}
    found = op(*(_plain(v, tensors) for v in node.args), **plain)
    return found if isinstance(found, list | tuple) else [found]


def _array(t: torch.Tensor) -> Array:
    return np.asarray(t.numpy(), np.float64 if t.is_floating_point() else np.int64)


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if "t" in value:
            return tensors[value["t"]]
        if "d" in value:
            return getattr(torch, value["d"].removeprefix("torch."))
        return value["v"] if "r" in value else float(value["x"])
    return [_plain(v, tensors) for v in value] if isinstance(value, list) else value
