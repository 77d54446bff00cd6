"""Which parameters the optimizers of a program hold, and the first elements of one: for probes that ask who trains it. Nothing is kept alive."""

from __future__ import annotations

import weakref
from typing import Any, Final

_TELLING: Final = 8  # elements that tell whether a parameter has moved


class Optimizers:
    """Those that a probe has met.

    Args:
        most: how many are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, weakref.ref[Any]] = {}

    def know(self, optimizer: Any) -> bool:
        """Remember one; false where there are too many to say what they hold."""
        known = self._known.get(id(optimizer))
        if known is not None and known() is optimizer:
            return True
        if len(self._known) >= self._most:
            return False
        self._known[id(optimizer)] = weakref.ref(optimizer)
        return True

    def living(self) -> list[Any]:
        return [optimizer for ref in self._known.values() if (optimizer := ref()) is not None]

    def held(self) -> set[int]:
        """Ids of their parameters."""
        return {id(p) for optimizer in self.living() for group in optimizer.param_groups for p in group["params"]}


def is_plain(p: Any) -> bool:
    """Whether this is a parameter that can be read without more: dense, whole, and on a device whose elements cost little."""
    import torch

    return type(p) is torch.nn.Parameter and p.layout is torch.strided and p.device.type in ("cpu", "cuda") and p.numel() > 0


def telling(p: Any) -> list[float]:
    """Elements that tell whether a parameter has moved."""
    return [float(x) for x in p.detach().reshape(-1)[:_TELLING].tolist()]
