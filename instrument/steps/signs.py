"""What the clock is told of an act, read off what the act is given. For whoever tells a clock: the observer's hooks, the oracle's collector."""

from __future__ import annotations

from typing import Any

import torch

from proctor.instrument.observe.tracked import is_zero


def key_of(optimizer: Any) -> int:
    """What the clock calls an optimizer: optimizers of the same parameters are one (a wrapper, one for each task)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            return id(p)
    return id(optimizer)


def moves_nothing(optimizer: Any) -> bool:
    """Whether an update changes no parameter for sure: no gradient, or a learning rate of 0 in all groups."""
    groups = optimizer.param_groups
    return all(is_zero(group.get("lr")) for group in groups) or all(p.grad is None for group in groups for p in group["params"])


def has_closure(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether an optimizer whose `step` is called so asks for gradients itself."""
    return any(callable(value) for value in (*args[1:], *(kwargs or {}).values()))


def asks_gradient(args: tuple[Any, ...]) -> bool:
    """Whether a tensor that a model is given requires a gradient; the first argument is the model."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args[1:])
