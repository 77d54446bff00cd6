"""What a program tells its optimizer and its clipping: numbers that no tensor shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from proctor.oracle.tensors import Clip, OptimizerGroup


def group_of(step: int, optimizer: Any, group: Mapping[str, Any], names: Callable[[Any], Iterable[str]]) -> OptimizerGroup:
    """The numbers of a parameter group.

    Args:
        step: of the run.
        optimizer: that has it.
        group: one of its `param_groups`.
        names: of the parameters that one of its tensors holds.
    """
    values: dict[str, float] = {}
    for key, value in group.items():
        if key != "params":
            values.update(_numbers(str(key), value))
    held = sorted({name for tensor in group["params"] for name in names(tensor)})
    return OptimizerGroup(step, type(optimizer).__name__, values, held)


def _numbers(key: str, value: Any) -> dict[str, float]:
    if isinstance(value, bool):
        return {}  # foreach, fused, capturable: how, not what
    if isinstance(value, int | float):
        return {key: float(value)} if math.isfinite(value) else {}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return {key: float(value)}
    if isinstance(value, tuple | list):
        return {k: v for i, part in enumerate(value) for k, v in _numbers(f"{key}.{i}", part).items()}
    return {}


def listed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `clip_grad_norm_`, with a list in the place of an iterator, which can be read once only."""
    if args and not isinstance(args[0], torch.Tensor | list | tuple):
        return (list(args[0]), *args[1:]), dict(kwargs)
    if "parameters" in kwargs and not isinstance(kwargs["parameters"], torch.Tensor | list | tuple):
        return tuple(args), {**kwargs, "parameters": list(kwargs["parameters"])}
    return tuple(args), dict(kwargs)


def clip_of(step: int, norm: float, args: Sequence[Any], kwargs: Mapping[str, Any], names: Callable[[Any], Iterable[str]]) -> Clip:
    """A call of `clip_grad_norm_`, of which `norm` is the result."""
    parameters = args[0] if args else kwargs.get("parameters", ())
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    most = args[1] if len(args) > 1 else kwargs.get("max_norm", math.inf)
    kind = args[2] if len(args) > 2 else kwargs.get("norm_type", 2.0)
    held = sorted({name for tensor in tensors for name in names(tensor)})
    return Clip(step, norm, float(most) if math.isfinite(float(most)) else None, str(float(kind)), held)
