"""Where a tensor crosses the edge of a module: an identity in the graph that looks at value and gradient.

While values are only recorded, a boundary is an alias of the tensor with a hook on its gradient (a hook on the tensor
itself would see the sum over all its users), which copies nothing and lets in-place operations of the user work as
before. Where values change, it is one autograd function: `forward` hands on a copy, `backward` the gradient. With
noise, value and gradient get a relative error of one rounding; with a replacement, they become what the reference had there.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

Look = Callable[[torch.Tensor], torch.Tensor | None]  # returns what is to be used instead, or None


class _Tap(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, on_value: Look | None, on_grad: Look | None) -> torch.Tensor:
        ctx.on_grad = on_grad
        other = on_value(x) if on_value is not None else None
        return x.clone() if other is None else other

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        other = ctx.on_grad(grad) if ctx.on_grad is not None and grad is not None else None
        if other is not None and torch.is_grad_enabled() and grad.requires_grad:
            other = grad + (other - grad).detach()  # a gradient of this gradient may be asked for
        return grad if other is None else other, None, None


def tap(x: torch.Tensor, on_value: Look | None, on_grad: Look | None) -> torch.Tensor:
    """A tensor with the same value, past a boundary.

    Args:
        x: a floating-point tensor.
        on_value: sees the value; may give another one.
        on_grad: sees the gradient on its way back; may give another one.
    """
    result: torch.Tensor = _Tap.apply(x, on_value, on_grad)
    return result


def watched(x: torch.Tensor, on_grad: Look, *, own_edge: bool) -> torch.Tensor:
    """The same tensor, with somebody who looks at its gradient; nothing is copied.

    Args:
        x: no leaf of the graph.
        on_grad: sees the gradient; what it gives is not used.
        own_edge: only the gradient that comes back past this boundary counts, not that of other users of `x`.
    """
    if not x.requires_grad:
        return x
    seen = torch.ops.aten.alias(x) if own_edge else x

    def look(grad: torch.Tensor | None) -> None:
        if grad is not None:  # undefined: a graph that DDP knows beforehand, of which a pass leaves a part out
            on_grad(grad)

    seen.register_hook(look)
    return seen


UNIT_ROUNDOFF = {  # half the distance of 1 to the next number
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_own = threading.local()
FP8_SIGMA = 2.0**-6  # u of e4m3 (2^-4) / 4: measured to cover a GEMM with inputs in e4m3 (findings, §3)


def noisy(x: torch.Tensor, sigma: float, *key: object) -> torch.Tensor:
    """`x · (1 + sigma·√3·U(−1, 1))`, rounded to the type of `x`; the same for the same key on any machine of one kind.

    Args:
        x: any shape, floating point.
        sigma: root mean square of the relative error.
        key: names the logical tensor.
    """
    local = x.to_local() if hasattr(x, "to_local") else x
    generator = torch.Generator().manual_seed(seed_of(*key))
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    _own.draws = True
    try:
        uniform = torch.empty(local.shape, dtype=wide).uniform_(-1.0, 1.0, generator=generator).to(local.device)
    finally:
        _own.draws = False
    moved = (local.to(wide) * (1.0 + sigma * 3.0**0.5 * uniform)).to(local.dtype)
    if local is x:
        return moved
    return type(x).from_local(moved, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def own_draw() -> bool:
    """Whether what is drawn now, in this thread, is noise of ours and nothing of the program's."""
    return getattr(_own, "draws", False)


def seed_of(*key: object) -> int:
    """A 63-bit seed from names and numbers; the same in every process."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def recomputing() -> bool:
    """Whether a backward pass is running: a forward now is recomputation."""
    return int(torch._C._current_graph_task_id()) != -1
