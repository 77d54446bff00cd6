"""Training loops as rows for `write_run`."""

from __future__ import annotations

from typing import Any

ZERO, BACK, STEP = "torch.optim.Optimizer.zero_grad", "torch.Tensor.backward", "torch.optim.Optimizer.step"


def process(rank: int = 0, world: int = 1, steps: int = 6, lost_from: int | None = None, **more: Any) -> dict[str, Any]:
    """A training loop that stops calling zero_grad at one step."""
    calls = []
    for s in range(steps):
        names = [ZERO, BACK, STEP] if lost_from is None or s < lost_from else [BACK, STEP]
        calls += [{"fn": fn, "step": s, "site": f"train.py:{3 + i}"} for i, fn in enumerate(names)]
    return {"rank": rank, "world": world, "calls": calls, **more}
