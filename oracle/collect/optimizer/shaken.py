"""Noise of an optimizer's own arithmetic, for runs from which tolerances are estimated.

Adam divides by 1 - β₂ᵗ. Where that is computed in float32 (`capturable`, `torch.compile` of the step) its error of u is
one of u / (1 - β₂) in the first step, halved by the root: 3e-5 of the update for β₂ = 0.999, far above the rounding of a
parameter that begins at zero. Measured: 6.5e-6 between a compiled AdamW and an eager one. Scaling the learning rate of
one step by as much moves every update alike, as the error does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.oracle.collect.edges.taps import UNIT_ROUNDOFF, noisy

SHORT = (torch.bfloat16, torch.float16)


class ShortSteps(TorchDispatchMode):  # type: ignore[misc]
    """Noise on what an optimizer computes in a shorter type than that of its parameters: Muon iterates a matrix in bfloat16.

    Each result in such a type is moved by one rounding of it; copies and views are none.

    Args:
        seed: of the noise sample.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._count = seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in SHORT and func._schema.name.removeprefix("aten::") in COMPUTES and type(result) is torch.Tensor:
            self._count += 1
            return noisy(result, UNIT_ROUNDOFF[result.dtype], self._seed, "update", "", str(self._count), 0)
        return result


COMPUTES = frozenset({"mm", "bmm", "addmm", "baddbmm", "_to_copy"})


def shaken(optimizer: Any, seed: int) -> Callable[[], None]:
    """Move the learning rates of an optimizer by the root mean square of that error, up or down.

    Args:
        optimizer: about to step.
        seed: of the noise sample; every step of it is moved the same way, so that nothing cancels.

    Returns:
        what puts them back.
    """
    before: list[tuple[dict[str, Any], Any]] = []
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if "lr" not in group or not isinstance(betas, tuple | list) or len(betas) < 2 or not 0.0 <= float(betas[1]) < 1.0:
            continue
        sigma = UNIT_ROUNDOFF[torch.float32] / (1.0 - float(betas[1])) / 12.0**0.5
        before.append((group, group["lr"]))
        group["lr"] = group["lr"] * (1.0 + (sigma if seed % 2 else -sigma))

    mode = None
    if not any(t.dtype in SHORT for group in optimizer.param_groups for t in group["params"]):
        mode = ShortSteps(seed)
        mode.__enter__()

    def restore() -> None:
        if mode is not None:
            mode.__exit__(None, None, None)
        for group, rate in before:
            group["lr"] = rate

    return restore
