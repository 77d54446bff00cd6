"""Tensors within the arguments and results of a call: found, exchanged, compared. Arrays of numpy count as tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

MAX_DEPTH: Final = 12
UNIT: Final = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tensors(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested tuples, lists, mappings, dataclasses and packed sequences, with their paths; a copy of an array of numbers."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif (array := _of_array(value)) is not None:
        yield path, array
    elif depth >= MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from tensors(item, f"{path}.{name}" if path else str(name), depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None), f"{path}.{field.name}" if path else field.name, depth + 1)


def exchanged(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """The same value with other tensors; what is no tensor, and containers of unknown kinds, stay what they are.

    Args:
        value: arguments of a call.
        change: path and tensor → the tensor in its place; an array is given as a tensor, and is an array again.
    """
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if (array := _of_array(value)) is not None:
        return change(path, array).detach().cpu().numpy()
    if depth >= MAX_DEPTH:
        return value

    def step(name: object, item: Any) -> Any:
        return exchanged(item, change, f"{path}.{name}" if path else str(name), depth + 1)

    if isinstance(value, dict):
        made = {key: step(key, item) for key, item in value.items()}
        if type(value) is dict:
            return made
        try:
            return type(value)(made)
        except (TypeError, ValueError):
            return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(step(name, item) for name, item in zip(value._fields, value, strict=True)))
    if isinstance(value, tuple | list):
        return type(value)([step(i, item) for i, item in enumerate(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = {f.name: step(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value) if f.init}
        try:
            return dataclasses.replace(value, **new)
        except (TypeError, ValueError):
            return value
    return value


def _of_array(value: Any) -> torch.Tensor | None:
    """A tensor with the numbers of an array; `None` where it is none, or has other items than torch's."""
    if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray" or not value.ndim:
        return None
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError):
        return None


def detached(value: Any) -> Any:
    """Copies of the tensors, that belong to no graph; what required gradients requires them."""
    return exchanged(value, lambda _, t: copied(t))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same values."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    made = tensor.detach().clone()
    return made.requires_grad_() if tensor.requires_grad else made


def difference(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """‖other − one‖ and ‖one‖; of integers the number that differ and how many there are. NaN at the same place is equal."""
    if one.shape != other.shape:
        return math.inf, 1.0
    if one.numel() == 0:
        return 0.0, 0.0
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).sum()), float(one.numel())
    a, b = _wide(one), _wide(other)
    off = torch.isnan(a) != torch.isnan(b)
    if bool(off.any()):
        return math.inf, 1.0
    gap = torch.where((a == b) | torch.isnan(a), torch.zeros_like(a), b - a)
    size = torch.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)
    return float(gap.norm()), float(size.norm())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return difference(one, other)[0] == 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64).reshape(-1)


def unit(*found: torch.Tensor) -> float:
    """The largest unit roundoff of the types of some tensors; that of float32 where none is floating."""
    return max((UNIT.get(t.dtype, 2.0**-24) for t in found if t.is_floating_point()), default=2.0**-24)
