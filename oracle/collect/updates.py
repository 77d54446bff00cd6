"""Noise of an optimizer's own arithmetic, for runs from which tolerances are estimated.

Adam divides by 1 - β₂ᵗ. Where that is computed in float32 (`capturable`, `torch.compile` of the step) its error of u is
one of u / (1 - β₂) in the first step, halved by the root: 3e-5 of the update for β₂ = 0.999, far above the rounding of a
parameter that begins at zero. Measured: 6.5e-6 between a compiled AdamW and an eager one. Scaling the learning rate of
one step by as much moves every update alike, as the error does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proctor.oracle.collect.taps import UNIT_ROUNDOFF


def shaken(optimizer: Any, seed: int) -> Callable[[], None]:
    """Move the learning rates of an optimizer by the root mean square of that error, up or down.

    Args:
        optimizer: about to step.
        seed: of the noise sample; every step of it is moved the same way, so that nothing cancels.

    Returns:
        what puts them back.
    """
    import torch

    before: list[tuple[dict[str, Any], Any]] = []
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if "lr" not in group or not isinstance(betas, tuple | list) or len(betas) < 2 or not 0.0 <= float(betas[1]) < 1.0:
            continue
        sigma = UNIT_ROUNDOFF[torch.float32] / (1.0 - float(betas[1])) / 12.0**0.5
        before.append((group, group["lr"]))
        group["lr"] = group["lr"] * (1.0 + (sigma if seed % 2 else -sigma))

    def restore() -> None:
        for group, rate in before:
            group["lr"] = rate

    return restore
