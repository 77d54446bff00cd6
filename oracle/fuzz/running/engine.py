"""What a rank holds under a DeepSpeed engine: parameters and, where ZeRO has not cut them, gradients and state; of those that it has cut what the program itself asked for (`ds_look`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from proctor.oracle.fuzz.running.observe import Seen, array_of, clean


def observe(moment: str, net: Any) -> Iterator[Seen]:
    """Gradients, or the optimizer's state and parameters.

    Args:
        moment: "backward" or "update".
        net: the engine; `shown`, if the program has set it, holds whole tensors of what is cut, and `saved` what a file has of the model.
    """
    named = [(clean(name), p) for name, p in net.module.named_parameters()]
    kind = {"backward": "gradient", "update": "state"}.get(moment)
    if kind is None:
        return
    found = getattr(net, "shown", {}) if _cut(net) else _whole(named, net, kind)
    yield from [Seen(kind, clean(name), array_of(value)) for name, value in found.items() if value is not None]
    if moment == "update":
        with importlib.import_module("deepspeed").zero.GatheredParameters([p for _, p in named]):
            yield from [Seen("parameter", name, array_of(p).copy()) for name, p in named]
        saved = {clean(name): value for name, value in getattr(net, "saved", {}).items()}
        yield from [Seen("parameter", name, array_of(saved[name]) if name in saved else np.zeros(0)) for name, _ in named if saved]


def _whole(named: list[tuple[str, Any]], net: Any, kind: str) -> dict[str, Any]:
    """What is not cut: gradients that are averaged already, or state."""
    if kind == "gradient":
        return {name: p.grad for name, p in named} if net.managed_gradient_accumulation() else {}
    state = net.optimizer.state
    return {f"{name}:{key}": value for name, p in named for key, value in state.get(p, {}).items() if isinstance(value, torch.Tensor)}


def reduced(net: Any) -> set[str] | None:
    """Names of parameters whose gradients are there to be seen before the engine's step; None for all."""
    if not _cut(net):
        return None if net.managed_gradient_accumulation() else set()
    return {clean(name) for name, p in net.module.named_parameters() if p.requires_grad} if hasattr(net, "shown") else set()


def _cut(net: Any) -> bool:
    """Whether ZeRO holds gradients and state."""
    return bool(net.zero_optimization_stage())
