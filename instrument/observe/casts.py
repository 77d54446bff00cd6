"""Autocast of a device type, as every torch that is promised says it: 2.3 has a function for each device type, later ones one for all.

Called by the recorder's probes at each call that is recorded, and by the self-check at a step that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["autocast_dtype", "autocast_enabled"]


def _of_old_torch() -> tuple[Callable[[str], bool], Callable[[str], torch.dtype]]:
    """For torch before 2.4, whose autocast knows the CPU and one kind of accelerator."""

    def enabled(device: str) -> bool:
        return bool(torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled())

    def dtype(device: str) -> torch.dtype:
        return torch.get_autocast_cpu_dtype() if device == "cpu" else torch.get_autocast_gpu_dtype()

    return enabled, dtype


autocast_enabled: Callable[[str], bool]
autocast_dtype: Callable[[str], torch.dtype]
if hasattr(torch, "get_autocast_dtype"):
    autocast_enabled, autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
else:
    autocast_enabled, autocast_dtype = _of_old_torch()
